# Apply the model's patch, and the test patch, each to the base tree, in indexes of our own: the work tree is not
# touched. Leaves $P/grade/NAME.tree and NAME.raw (what each changed). $@: names of the patches, the model's first.
g="$P/grade"
read -r commit tree <"$P/base"

apply() { # apply NAME REFUSED: exits with REFUSED when the patch does not fit the base
  export GIT_INDEX_FILE="$g/$1.index"
  rm -f "$GIT_INDEX_FILE"
  snap read-tree "$tree"
  cd "$W"
  snap apply --cached --check --verbose "$g/$1.patch" >"$g/$1.log" 2>&1 || { cat "$g/$1.log" >&2; exit "$2"; }
  snap apply --cached --verbose --whitespace=nowarn "$g/$1.patch" >"$g/$1.log" 2>&1 || { cat "$g/$1.log" >&2; exit 1; }
  if grep -q '^Skipped patch' "$g/$1.log"; then cat "$g/$1.log" >&2; exit "$2"; fi
  snap write-tree >"$g/$1.tree"
  snap diff-tree -r -z --raw --no-abbrev --no-renames "$tree" "$(cat "$g/$1.tree")" >"$g/$1.raw"
  # A patch that was "applied" without an effect on one of its paths was not applied.
  snap apply --numstat -z "$g/$1.patch" | cut -z -f 3- | sort -zu >"$g/$1.named"
  snap diff-tree -r -z --name-only --no-renames "$tree" "$(cat "$g/$1.tree")" | sort -zu >"$g/$1.changed"
  [ -z "$(comm -z -23 "$g/$1.named" "$g/$1.changed" | tr '\0' '\n' | tee /dev/stderr)" ] || exit "$2"
}

apply model 40
if [ $# -gt 1 ]; then apply test 41; fi
