# Take the patch: base tree against the work tree as it is now. $1 is the expected base commit, $2 the size limit.
# Leaves $P/out/patch and $P/out/report (records of key, tab, value, each ended by NUL).
out="$P/out"
rm -rf "$out"
mkdir -p "$out"
[ -s "$P/base" ] && [ -s "$P/base-paths" ] || die 25 'no pristine repository was kept'
read -r commit tree <"$P/base"
[ "$commit" = "$1" ] || die 24 "the kept base is $commit"
[ -d "$W" ] || die 26 "$W is gone"

{ # what is noted: files made readable, repositories inside, special files
  cd "$W"
  find . -path ./.git -prune -o -type d ! -perm -700 -exec chmod u+rwx {} \; -printf 'made readable\t%P\0' \
    -o -type f ! -perm -400 -exec chmod u+r {} \; -printf 'made readable\t%P\0'
  find . -mindepth 2 -name .git -prune -printf 'nested repository taken as plain files\t%P\0'
  find . -path ./.git -prune -o ! -type f ! -type l ! -type d -printf 'special file left out\t%P\0'
} >"$out/notes"

choose_paths "$P/base-paths" "$out"
sed -z 's/^/ignored by the base, left out\t/' <"$out/ignored" >>"$out/notes"

# A new file this large is not even read: nothing of it could come below the limit.
(cd "$W" && find . -name .git -prune -o -type f -size +$(($2 * 20))c -printf '%P\0') | sort -z |
  comm -z -12 - "$out/kept" | comm -z -23 - "$P/base-paths" >"$out/huge"
if [ -s "$out/huge" ]; then
  (cd "$W" && xargs -0 stat -c '%s bytes: %n' -- <"$out/huge") >&2
  exit 30
fi

after=$(write_snapshot "$out")
options=(-r -p --binary --full-index --no-ext-diff --no-textconv --no-color --no-renames --unified=3
  --diff-algorithm=myers --src-prefix=a/ --dst-prefix=b/)
{ snap diff-tree "${options[@]}" "$tree" "$after" || [ $? -eq 141 ]; } | head -c $(($2 + 1)) >"$out/patch"
size=$(stat -c %s "$out/patch")
if [ "$size" -gt "$2" ]; then
  (cd "$W" && snap diff-tree -r -z --name-only --no-renames --diff-filter=d "$tree" "$after" |
    xargs -0 -r stat -c '%s bytes: %n' -- | sort -rn | sed -n 1,10p) >&2
  exit 30
fi
snap diff-tree -r -z --numstat --no-renames "$tree" "$after" >"$out/numstat"
{
  printf 'size\t%s\0' "$size"
  printf 'sha256\t%s\0' "$(sha256sum "$out/patch" | cut -d ' ' -f 1)"
  sed -z 's/^/change\t/' <"$out/numstat"
  sed -z 's/^/note\t/' <"$out/notes"
} >"$out/report"
