from __future__ import annotations

import re
from pathlib import Path

from orchestrator.errors import GRADE_RULES
from orchestrator.grading.base import Evidence
from orchestrator.grading.task_files import Ruling

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "grading.md").read_text()


def test_the_page_shows_the_outcome_table():
    answer = {True: "yes", False: "no"}
    rows = [
        f"| `{outcome}` | {answer[rule.verdict]} | {'none' if rule.reward is None else rule.reward} | {answer[rule.maskable]} |"
        for outcome, rule in GRADE_RULES.items()
    ]
    head = "| outcome | verdict | reward | a control run may mask it |\n|---|---|---|---|\n"
    assert head + "\n".join(rows) + "\n\n" in PAGE


def test_the_page_names_every_kind_of_evidence_and_every_flag():
    source = "".join(path.read_text() for path in sorted((ROOT / "orchestrator" / "grading").glob("*.py")))
    made = set(re.findall(r'\.mark\("(\w+)"', source)) | set(Ruling)
    made |= set(re.findall(r'f"(\w+):\{', source)) & {"adds", "suspicious", "signal", "prefix_match"}
    made |= set(re.findall(r'flags\.append\("(\w+)"\)', source)) | set(re.findall(r'\["(\w+)"\] if', source))
    shown = set(re.findall(r"^\| `(\w+)[:`]", PAGE, re.MULTILINE))
    assert {"shadow", "test_infra", "log_truncated", "output_after_session", "signal", "adds"} <= made
    assert made - shown == set()
    assert {evidence.value for evidence in Evidence} <= shown
