# Bring the work tree from the base to the final tree: the model's tree, with $P/grade/entries (index lines) and the
# files of $P/grade/blobs (named, in order, by blobs.list) over it. Git does the file work, so that a link or a
# folder in the way is replaced and never followed.
g="$P/grade"
read -r commit tree <"$P/base"
export GIT_INDEX_FILE="$g/final.index"
rm -f "$GIT_INDEX_FILE"
snap read-tree "$(cat "$g/model.tree")"
snap update-index --replace -z --index-info <"$g/entries"
n=0
while IFS= read -r -d '' path; do
  printf '100644 %s\t%s\0' "$(snap hash-object -w --no-filters "$g/blobs/$n")" "$path"
  n=$((n + 1))
done <"$g/blobs.list" >"$g/placed"
snap update-index --replace -z --index-info <"$g/placed"
final=$(snap write-tree)

export GIT_INDEX_FILE="$g/worktree.index"
rm -f "$GIT_INDEX_FILE"
cd "$W"
snap read-tree "$tree"
snap update-index -q --refresh || true
snap read-tree --reset -u "$final"
snap update-index -q --refresh
snap diff-files --quiet || die 1 'the work tree does not hold what was placed'
# A compiled file is trusted when its source has the recorded second and size, which a quick edit can keep.
snap diff-tree -r -z --name-only --no-renames --diff-filter=d "$tree" "$final" | while IFS= read -r -d '' path; do
  folder=./
  [[ $path != */* ]] || folder=./${path%/*}/
  name=${path##*/}
  [[ $name != *.py ]] || rm -f -- "${folder}__pycache__/${name%.py}".*.pyc
done
