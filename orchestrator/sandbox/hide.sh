# After keep.sh: the agent finds no repository.
chmod -R u+rwx "$W/.git" 2>/dev/null || true
rm -rf "$W/.git"
printf '%s\n' "$commit"
