# Shared head of every script of ours that touches a repository inside a sandbox. $W is the work tree, $P the
# private directory. Nothing the agent left (configuration, hooks, attributes, home folder, index) takes part.
set -euo pipefail
shopt -s inherit_errexit
export LC_ALL=C HOME="$P/home" XDG_CONFIG_HOME="$P/home"
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_OPTIONAL_LOCKS=0
export GIT_TERMINAL_PROMPT=0 GIT_NO_REPLACE_OBJECTS=1
GIT_CEILING_DIRECTORIES=$(dirname "$W")
export GIT_CEILING_DIRECTORIES

die() { # die STATUS MESSAGE
  printf '%s\n' "$2" >&2
  exit "$1"
}

pristine() { git --git-dir="$P/pristine.git" "$@"; }

own_git() { # own_git WORKTREE ARGUMENTS...: git with our repository and our rules only
  local tree=$1
  shift
  git --git-dir="$P/snapshot.git" --work-tree="$tree" -c core.bare=false -c core.hooksPath=/dev/null \
    -c core.fsmonitor=false -c core.autocrlf=false -c core.excludesFile=/dev/null -c core.attributesFile=/dev/null \
    -c core.untrackedCache=false -c core.looseCompression=0 -c core.fileMode=true -c core.symlinks=true "$@"
}

snap() { own_git "$W" "$@"; }

walk() { # every regular file and link below the work tree, repositories' own folders left out
  (cd "$W" && find . -name .git -prune -o \( -type f -o -type l \) -printf '%P\0') | sort -z
}

list_ignored() { # list_ignored FILE: those of its paths that the base's rules ignore
  local _source _line pattern path
  # Verbose, because older versions also report paths whose last match is a negated pattern; `./`, because a path
  # may begin with a colon, which would be pathspec magic.
  { (cd "$P/ignore" && own_git "$P/ignore" check-ignore --no-index --verbose -z --stdin < <(sed -z 's|^|./|' "$1")) || [ $? -eq 1 ]; } |
    while IFS= read -r -d '' _source && IFS= read -r -d '' _line &&
      IFS= read -r -d '' pattern && IFS= read -r -d '' path; do
      [[ $pattern == '!'* ]] || printf '%s\0' "${path#./}"
    done
}

choose_paths() { # choose_paths TRACKED DIR: DIR/kept and DIR/ignored, sorted
  walk >"$2/walk"
  comm -z -12 "$2/walk" "$1" >"$2/present"
  comm -z -23 "$2/walk" "$1" >"$2/untracked"
  : >"$2/ignored"
  if [ -s "$2/untracked" ]; then list_ignored "$2/untracked" | sort -z >"$2/ignored"; fi
  comm -z -23 "$2/untracked" "$2/ignored" | sort -z - "$2/present" >"$2/kept"
}

write_snapshot() { # write_snapshot DIR: store every kept path as it is, byte for byte, and print the tree
  export GIT_INDEX_FILE="$1/index"
  rm -f "$GIT_INDEX_FILE"
  snap read-tree --empty
  (cd "$W" && snap update-index --add --replace -z --stdin) <"$1/kept" || return 23
  snap ls-files -z | sort -z | cmp -s - "$1/kept" || { echo 'the index does not hold every file' >&2; return 23; }
  snap write-tree
}
