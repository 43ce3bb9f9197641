"""`pytest --quick`: of each test some cases, and none that takes long."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .. import quick

PROJECT = """
import pytest
@pytest.mark.parametrize("case", range(21))
def test_of_twenty_one(case): pass
@pytest.mark.parametrize("case", range(3))
def test_of_three(case): pass
def test_alone(): pass
@pytest.mark.thorough
@pytest.mark.parametrize("case", range(3))
def test_long(case): pass
"""
CONFTEST = """
from tests import quick
from pathlib import Path
quick.ROOT, quick.WHOLE = Path(__file__).parent, ("cheap/",)
pytest_addoption = quick.add_option
def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: takes long")
    if config.getoption("quick"): config.pluginmanager.register(quick.Quick())
"""


def test_one_case_in_twenty_but_no_thorough_one():
    names = [f"far/test_x.py::test_{test}[{case}]" for test in "ab" for case in "abcdefghijklmnopqrstuvw"]
    whole = ["nn/test_y.py::test_c[1]", "nn/test_y.py::test_c[2]", "far/test_x.py::test_d"]
    tests = [(name, False) for name in names + whole] + [("nn/test_y.py::test_e", True), ("test_z.py::test_f[1]", True)]
    kept = {name for name, _ in tests} - quick.left_out(tests)
    assert kept == {*whole, *(f"far/test_x.py::test_{test}[{case}]" for test in "ab" for case in "au")}


@pytest.mark.parametrize("flags, passed", [((), 56), (("--quick",), 4 + 25), (("--quick", "-k", "twenty_one"), 42)])
def test_what_pytest_runs(tmp_path, flags, passed):
    for folder in ("cheap", "dear"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(PROJECT)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    said = subprocess.run([sys.executable, "-m", "pytest", "-q", *flags], cwd=tmp_path, capture_output=True, text=True,
                          env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])}, timeout=100).stdout
    assert re.search(rf"^{passed} passed", said, re.M), said


def test_what_is_run_whole_is_there():
    assert all((quick.ROOT / place).exists() for place in quick.WHOLE)


@pytest.mark.parametrize("left, right", [(1, 2), (3, 4)])
def test_fixtures_know_what_will_run(request, left, right):
    found = quick.asked(request, "right", "left")
    assert (right, left) in found and set(found) <= {(2, 1), (4, 3)}
    assert quick.asked(request, "left", "flags") == []
