"""One language for every benchmark: a gate is a ratio from one interleaved run, or a count, against a target."""

from __future__ import annotations

import json
import operator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).resolve().parent / "results"
_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One figure and what it must be; `detail` holds what it was made of and is not gated."""

    gate: str
    value: float
    op: str
    target: float
    rounds: int
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the figure reaches its target."""
        return bool(_COMPARISONS[self.op](self.value, self.target))

    def line(self) -> str:
        """Return the gate as one line of JSON."""
        fields = asdict(self)
        detail = fields.pop("detail")
        rounds = fields.pop("rounds")
        fields["value"] = round(self.value, 4)
        return json.dumps(fields | {"ok": self.ok, "rounds": rounds, "detail": detail})


def show(gates: Sequence[Gate], *, as_json: bool) -> None:
    """Print the gates: a table for people, or one line of JSON each."""
    if as_json:
        for gate in gates:
            print(gate.line())
        return
    width = max(len(gate.gate) for gate in gates)
    print(f"{'gate':<{width}}  {'value':>9}  {'target':>10}  rounds")
    for gate in gates:
        target = f"{gate.op} {gate.target:g}"
        verdict = "ok" if gate.ok else "MISSED"
        print(f"{gate.gate:<{width}}  {gate.value:>9.3g}  {target:>10}  {gate.rounds:>6}  {verdict}")
        for name, value in gate.detail.items():
            print(f"{'':<{width}}    {name}: {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_shown(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def keep(name: str, gates: Sequence[Gate]) -> Path:
    """Store the lines under `bench/results/` and return the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    path.write_text("".join(f"{gate.line()}\n" for gate in gates), encoding="utf-8")
    return path
