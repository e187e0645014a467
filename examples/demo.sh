#!/usr/bin/env bash
# The demo behind `make demo`: example tasks, recorded turns instead of a model, real sandboxes and real grading.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export ROLLOUTS_DATABASE_URL=sqlite:///logs/demo.db

flags=()
if ! python -m orchestrator.sandbox.probe >/dev/null 2>&1; then
  echo "This machine isolates no sandboxes; the demo's own recorded turns run without (--allow-no-isolation)." >&2
  flags+=(--allow-no-isolation)
fi

show() {
  local shown=() word
  for word in "$@"; do [[ $word == *' '* ]] && shown+=("\"$word\"") || shown+=("$word"); done
  printf '\n$ rollouts %s\n' "${shown[*]}"
  rollouts "$@"
}

code=0
show run examples/tasks --model replay:examples/replay.yaml -n 3 -j 2 "${flags[@]}" || code=$?
if [ "$code" -eq 1 ]; then
  echo "Not every task ran (see above); tasks made from package releases need the network the first time." >&2
elif [ "$code" -ne 0 ]; then
  exit "$code"
fi
show list -n 9
show sql "select state, count(*) from rollouts group by 1"
printf '\nNext: export ROLLOUTS_DATABASE_URL=%s; .venv/bin/rollouts show ID\n' "$ROLLOUTS_DATABASE_URL" >&2
