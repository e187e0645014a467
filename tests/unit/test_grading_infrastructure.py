from __future__ import annotations

import pytest

from orchestrator.grading.flags import scan_exit_code, scan_log, scan_patch
from orchestrator.grading.infrastructure import restore_sections, steers_tests
from orchestrator.grading.placement import Change, parse_raw


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("conftest.py", True),
        ("a/b/conftest.py", True),
        ("pytest.ini", True),
        ("sub/tox.ini", True),
        ("sitecustomize.py", True),
        ("usercustomize/__init__.py", True),
        ("x.pth", True),
        ("x.egg-info/entry_points.txt", True),
        ("x-1.dist-info/METADATA", True),
        ("a/__pycache__/test_x.cpython-311.pyc", True),
        (".venv/bin/python", True),
        ("pytest/core.py", False),
        ("src/_pytest/main.py", False),
        ("setup.cfg", False),
        ("my_conftest.py", False),
        ("docs/tox.ini.rst", False),
        ("", False),
    ],
)
def test_what_steers_a_test_run_is_recognised_by_its_name(path, expected):
    assert steers_tests(path) is expected


BASE_INI = b"[metadata]\nname = a\n[tool:pytest]\naddopts = -q\n"
BASE_TOML = b'[project]\nname = "a"\n[tool.pytest.ini_options]\naddopts = "-q"\n'


@pytest.mark.parametrize(
    ("name", "base", "changed", "expected"),
    [
        ("setup.cfg", BASE_INI, BASE_INI.replace(b"= a", b"= b"), None),
        ("setup.cfg", BASE_INI, BASE_INI.replace(b"= a", b"= b").replace(b"-q", b"-x"), BASE_INI.replace(b"= a", b"= b")),
        ("setup.cfg", b"", b"[a]\nb = 1\n[tool:pytest]\naddopts = -x\n", b"[a]\nb = 1\n"),
        ("setup.cfg", BASE_INI, b"[tool:pytest\n", BASE_INI),
        ("pyproject.toml", BASE_TOML, BASE_TOML.replace(b"-q", b"-x"), BASE_TOML),
        ("pyproject.toml", BASE_TOML, b'tool.pytest.ini_options.addopts = "-x"\n', BASE_TOML),
        ("pyproject.toml", BASE_TOML, b'[tool.other]\nx = 1\n["tool"."pytest".ini_options]\naddopts = "-x"\n',
         b'[tool.other]\nx = 1\n[tool.pytest.ini_options]\naddopts = "-q"\n'),
        ("pyproject.toml", BASE_TOML, b"\xff\xfe", BASE_TOML),
    ],
    ids=["other section", "both", "added file", "broken ini", "toml", "toml dotted at the top", "toml quoted", "not text"],
)  # fmt: skip
def test_only_the_runners_sections_are_put_back(name, base, changed, expected):
    assert restore_sections(name, base, changed) == (changed if expected is None else expected)


def test_raw_diffs_are_read_with_any_byte_in_a_path():
    a, b = "1" * 40, "0" * 40
    raw = f":100644 000000 {a} {b} D\0".encode() + b"x \n\xff\0" + f":000000 120000 {b} {a} A\0y\0".encode()
    assert parse_raw(raw) == [
        Change("x \n\udcff", "100644", "000000", a, b, "D"),
        Change("y", "000000", "120000", b, a, "A"),
    ]
    assert parse_raw(b"") == []


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (b"+import os; os._exit(0)", ["adds:os._exit"]),
        (b"+import atexit", ["adds:atexit"]),
        (b"+    sys.exit(1)", ["adds:sys.exit"]),
        (b"+PASSED tests/a.py::b", ["adds:status_word"]),
        (b"+print('>>>>> Start')", ["adds:marker"]),
        (b"+open('junit.xml')", ["adds:junit"]),
        (b"+import _pytest", ["adds:_pytest"]),
        (b"+m = __import__('_py' + 'test.reports')", ["suspicious:__import__", "suspicious:split_string"]),
        (b"+m = 'py' 'test'", ["suspicious:split_string"]),
        (b"+getattr(os, '_ex'+'it')(0)", ["suspicious:split_string"]),
        (b"+importlib.import_module(x)", ["suspicious:importlib"]),
        (b"+for m in sys.modules.values():", ["suspicious:sys.modules"]),
        (b"+for o in gc.get_objects():", ["suspicious:gc"]),
        (b"+cls = TestReport", ["suspicious:TestReport"]),
        (b"+f = sys._getframe(1)", ["suspicious:frames"]),
        (b"+exec(text)", ["suspicious:exec"]),
        (b"+import ctypes", ["suspicious:ctypes"]),
        (b"+open('/proc/self/mem')", ["suspicious:proc"]),
        (b"+names = ['a', 'b'] + ['pytest']", []),
        (b"+regex.exec(1)", []),
        (b"-import atexit", []),
        (b" import atexit", []),
        (b"+++ b/atexit.py", []),
        (b"+fine = 1", []),
    ],
)
def test_added_lines_alone_are_scanned(line, flags):
    assert scan_patch(b"diff --git a/a b/a\n" + line + b"\n") == flags


def test_output_after_the_session_and_signals_are_flagged():
    closing = b"===== 3 passed, 1 warning in 0.05s =====\n"
    assert scan_log(b"x\n" + closing) == []
    assert scan_log(closing + b"forged\n") == ["output_after_session"]
    assert scan_log(b"no session\n") == []
    assert [scan_exit_code(code) for code in (0, 1, None, 137, -9)] == [
        [],
        [],
        [],
        ["signal:9"],
        ["signal:9"],
    ]
