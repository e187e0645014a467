"""Names of the test-log parsers that the grader implements; a record that asks for another is refused at load."""

from __future__ import annotations

PYTEST = "pytest"
PYTEST_OPTIONS = "pytest_options"
PYTEST_V2 = "pytest_v2"

LOG_PARSERS: dict[str, str] = {
    "pytest": PYTEST,
    "parse_log_pytest": PYTEST,
    "parse_log_astroid": PYTEST,
    "parse_log_flask": PYTEST,
    "parse_log_marshmallow": PYTEST,
    "parse_log_pvlib": PYTEST,
    "parse_log_pyvista": PYTEST,
    "parse_log_sqlfluff": PYTEST,
    "parse_log_xarray": PYTEST,
    "parse_log_pytest_options": PYTEST_OPTIONS,
    "parse_log_pydicom": PYTEST_OPTIONS,
    "parse_log_pylint": PYTEST_OPTIONS,
    "parse_log_requests": PYTEST_OPTIONS,
    "parse_log_pytest_v2": PYTEST_V2,
    "parse_log_astropy": PYTEST_V2,
    "parse_log_scikit": PYTEST_V2,
    "parse_log_sphinx": PYTEST_V2,
}
"""Name in a record -> flavour of pytest output (names and equivalences: SWE-bench 5.0.2 `harness/log_parsers`).

`pytest`: the line begins with the status, the second word is the id. `pytest_options`: the same, and of an option in
brackets that begins with one slash only the part after the last slash stays. `pytest_v2`: colours and control
characters are dropped, an id may hold blanks, and the status may stand at the end of the line instead.
"""

KNOWN_PARSERS = frozenset(LOG_PARSERS)
