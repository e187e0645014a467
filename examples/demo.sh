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

# The same work once more, with its worker killed in the middle: what resume makes of it must be what was there before.
answers() {
  rollouts sql "select distinct instance_id, sample, reward from rollouts join rewards on rollout_id = id where $1 order by 1, 2"
}
name="killed-$(date +%s)"
printf '\n$ rollouts run examples/tasks --model replay:examples/replay.yaml -n 3 -j 2 --run %s &  # and kill -9 it\n' "$name"
rollouts run examples/tasks --model replay:examples/replay.yaml -n 3 -j 2 --run "$name" "${flags[@]}" 2>/dev/null &
worker=$!
while kill -0 "$worker" 2>/dev/null; do
  taken=$(rollouts sql "select count(*) from patches where rollout_id in (select id from rollouts where run_id = '$name')")
  [ "$taken" -ge 2 ] && break
done
kill -KILL "$worker" 2>/dev/null || true
wait "$worker" 2>/dev/null || true
show sql "select state, count(*) from rollouts where run_id = '$name' group by 1"
show resume --run "$name" "${flags[@]}"
show clean
if diff <(answers "run_id = '$name'") <(answers "run_id not like 'killed-%'"); then
  printf '\nThe killed and resumed run has the same rewards as the undisturbed one.\n'
else
  printf '\nThe killed and resumed run has other rewards than the undisturbed one!\n' >&2
  exit 1
fi
printf '\nNext: export ROLLOUTS_DATABASE_URL=%s; .venv/bin/rollouts show ID\n' "$ROLLOUTS_DATABASE_URL" >&2
