# Keep the pristine repository and the base tree. Runs before the agent does; a repeat after a crash starts over
# until the last line, `base`, exists.
check_history() {
  local refs
  [ ! -e "$P/pristine.git/objects/info/alternates" ] || die 22 'the repository borrows objects from another one'
  [ "$(pristine rev-list --count --all --reflog HEAD)" = 1 ] || die 22 'the repository has more than one commit'
  refs=$(pristine for-each-ref --format='%(objectname)')
  [ -z "$refs" ] || [ "$refs" = "$commit" ] || die 22 'the repository has more than one ref'
  [ -z "$(pristine fsck --unreachable --no-reflogs --connectivity-only --no-progress 2>/dev/null)" ] ||
    die 22 'the repository holds unreachable objects'
}

make_snapshot_repository() {
  local format=sha1
  [ ${#commit} -eq 40 ] || format=sha256
  GIT_TEMPLATE_DIR='' git init -q --bare --object-format="$format" "$P/snapshot.git"
  mkdir -p "$P/snapshot.git/info" "$P/snapshot.git/objects/info"
  printf '%s\n' "$P/pristine.git/objects" >"$P/snapshot.git/objects/info/alternates"
  # Outranks every .gitattributes in the tree: bytes stay bytes, and every file can be diffed.
  printf '%s\n' '* -text -filter -merge -ident !eol !working-tree-encoding' '* diff' >"$P/snapshot.git/info/attributes"
  { cat "$P/pristine.git/info/exclude" 2>/dev/null || true; printf '%s\n' "$GENERATED"; } >"$P/snapshot.git/info/exclude"
}

copy_ignore_rules() {
  mkdir -p "$P/ignore"
  (cd "$W" && find . -name .git -prune -o -type f -name .gitignore -print0) |
    (cd "$W" && tar -cf - --null --no-recursion -T -) | tar -C "$P/ignore" -xf -
}

keep() {
  [ -d "$W/.git" ] && [ ! -L "$W/.git" ] || die 21 "$W holds no repository"
  rm -rf "$P/pristine.git" "$P/snapshot.git" "$P/ignore" "$P/home" "$P/kept"
  mkdir -p "$P/home" "$P/kept"
  cp -a "$W/.git" "$P/pristine.git"
  commit=$(pristine rev-parse --verify 'HEAD^{commit}')
  check_history
  make_snapshot_repository
  copy_ignore_rules
  pristine ls-tree -r -z --name-only --full-tree "$commit" | sort -z >"$P/kept/tracked"
  choose_paths "$P/kept/tracked" "$P/kept"
  tree=$(write_snapshot "$P/kept")
  mv "$P/kept/kept" "$P/base-paths"
  rm -rf "$P/kept"
  printf '%s %s\n' "$commit" "$tree" >"$P/base.new"
  mv "$P/base.new" "$P/base"
}

[ -s "$P/base" ] || keep
read -r commit tree <"$P/base"
[ "$(pristine rev-parse --verify 'HEAD^{commit}')" = "$commit" ] || die 24 'the pristine repository changed'
