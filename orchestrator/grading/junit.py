"""Read a JUnit report that hostile code may have written: bounded, no document types, no entities.

Format: pytest's `junit_family=xunit1` (a `testcase` has `classname`, `name` and `file`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.parsers import expat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SIZE_LIMIT = 64 * 1024 * 1024
_DEPTH_LIMIT = 32
_WORST_FIRST = ("ERROR", "FAILED", "SKIPPED", "XFAIL", "XPASS", "PASSED")


class ReportUnreadable(ValueError):
    """The report is missing, too large, not XML, or tries something no test runner writes."""


@dataclass(slots=True)
class Report:
    """What a JUnit file says."""

    tests: dict[str, str] = field(default_factory=dict)
    """Test id -> status; of several entries for one id the worst counts."""
    cases: int = 0
    counters_agree: bool = True
    """The totals of each suite equal what its cases add up to."""


@dataclass(slots=True)
class _Case:
    classname: str
    name: str
    file: str
    statuses: list[str] = field(default_factory=list)


def worst(statuses: Iterable[str]) -> str:
    """Return the status that counts when one test has several."""
    return min(statuses, key=_WORST_FIRST.index)


def address(node_id: str) -> tuple[str, str]:
    """Return the (classname, name) under which pytest reports a test id: what JUnit files key tests by."""
    path, bracket, parameters = node_id.partition("[")
    names = path.split("::")
    names[0] = re.sub(r"\.py$", "", names[0].replace("/", "."))
    names[-1] += bracket + parameters
    return ".".join(names[:-1]), names[-1]


def parse_junit(data: bytes, listed: Iterable[str] = ()) -> Report:
    """Parse a report; ids in `listed` are recognised even where a test is inherited from another file.

    Raises `ReportUnreadable`. A report without a test case is returned with `cases` 0.
    """
    if len(data) > SIZE_LIMIT:
        raise ReportUnreadable(f"the report has {len(data)} bytes, more than {SIZE_LIMIT}")
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = _refuse_doctype
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise ReportUnreadable(f"the report is not XML: {error}") from error
    known = {address(node_id): node_id for node_id in listed}
    files = {case.file for case in reader.cases} | {node_id.split("::", 1)[0] for node_id in known.values()}
    modules = {address(f"{file}::")[0]: file for file in files if file}
    report = Report(cases=len(reader.cases), counters_agree=reader.counters_agree)
    for case in reader.cases:
        node_id = known.get((case.classname, case.name)) or _rebuild_id(case, modules)
        seen = case.statuses or ["PASSED"]
        report.tests[node_id] = worst([*seen, report.tests.get(node_id, "PASSED")])
    return report


def _refuse_doctype(*_: object) -> None:
    raise ReportUnreadable("the report declares a document type, which no test runner writes")


def _rebuild_id(case: _Case, modules: Mapping[str, str]) -> str:
    """Return the test id: file, classes, name. `file` is where the function stands, so the class name decides."""
    module, classes = case.classname, list[str]()
    while module and module not in modules:
        module, _, last = module.rpartition(".")
        classes.insert(0, last)
    if module:
        return "::".join((modules[module], *classes, case.name))
    return "::".join(part for part in (case.classname, case.name) if part)


class _Reader:
    """Collects cases and checks each suite's counters against them."""

    def __init__(self) -> None:
        self.cases: list[_Case] = []
        self.counters_agree = True
        self._path: list[str] = []
        self._case: _Case | None = None
        self._suites: list[tuple[dict[str, str], int]] = []

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._path.append(tag)
        if len(self._path) > _DEPTH_LIMIT:
            raise ReportUnreadable("the report is nested deeper than any test runner writes")
        if tag == "testsuite":
            self._suites.append((attributes, len(self.cases)))
        elif tag == "testcase":
            get = attributes.get
            self._case = _Case(classname=get("classname", ""), name=get("name", ""), file=get("file", ""))
            self.cases.append(self._case)
        elif self._case is not None and self._path[-2:-1] == ["testcase"]:
            self._note(self._case, tag, attributes)

    def end(self, tag: str) -> None:
        self._path.pop()
        if tag == "testcase":
            self._case = None
        elif tag == "testsuite":
            attributes, first = self._suites.pop()
            self.counters_agree &= _counters_agree(attributes, self.cases[first:])

    @staticmethod
    def _note(case: _Case, tag: str, attributes: dict[str, str]) -> None:
        if tag == "failure":
            case.statuses.append("FAILED")
        elif tag == "error":
            case.statuses.append("ERROR")
        elif tag == "skipped":
            case.statuses.append("XFAIL" if attributes.get("type") == "pytest.xfail" else "SKIPPED")


def _counters_agree(attributes: Mapping[str, str], cases: list[_Case]) -> bool:
    """Compare a suite's totals with its cases.

    pytest counts a test that fails twice (call, teardown) once and a passed subtest, which has no entry, as a test.
    """
    failed = sum(case.statuses.count("FAILED") for case in cases)
    errored = sum(case.statuses.count("ERROR") for case in cases)
    skipped = sum(1 for case in cases if {"SKIPPED", "XFAIL"} & set(case.statuses))
    distinct = len({(case.classname, case.name) for case in cases})
    try:
        totals = {key: int(attributes.get(key, "-1")) for key in ("tests", "failures", "errors", "skipped")}
    except ValueError:
        return False
    return (
        totals["tests"] >= distinct
        and totals["failures"] == failed
        and totals["errors"] == errored
        and totals["skipped"] == skipped
    )
