# Put the pristine repository back. Whatever is at .git is replaced, never merged; a repeat does it all again.
[ -s "$P/base" ] || die 25 'no pristine repository was kept'
read -r commit tree <"$P/base"
if [ -d "$W/.git" ] && [ ! -L "$W/.git" ]; then chmod -R u+rwx "$W/.git" 2>/dev/null || true; fi
rm -rf "$W/.git"
cp -a "$P/pristine.git" "$W/.git"
[ "$(git --git-dir="$W/.git" rev-parse --verify 'HEAD^{commit}')" = "$commit" ] || die 24 'the pristine repository changed'
printf '%s\n' "$commit"
