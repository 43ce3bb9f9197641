"""A second pytest beside the first: its tests are told as if the first had run them, and nothing outlives either."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minitorch_dist.testing import ranks
from tests.aside import NICE

CONFTEST = """
from pathlib import Path
from tests import aside
aside.ROOT, aside.ASIDE, aside.AT_LEAST = Path(__file__).parent, ("far/",), {least}
def pytest_configure(config):
    config.pluginmanager.register(aside.plugin(config), "aside")
"""
NEAR = """
import os, pytest
def test_right(record_property):
    record_property("process", os.getpid())
"""
FAR = """
import os, pytest, warnings
@pytest.fixture(autouse=True)
def process(record_property):
    record_property("process", os.getpid())
@pytest.fixture
def broken():
    raise KeyError("of the fixture")
@pytest.mark.parametrize("text", ["a", "b\\nc", "ö"])
def test_right(text): assert os.nice(0) in NICENESS
def test_wrong():
    print("what it printed")
    assert [1, 2] == [1, 3]
def test_broken(broken): pass
def test_skipped(): pytest.skip("for a reason")
@pytest.mark.xfail
def test_expected(): assert False
def test_warns(): warnings.warn("a word of warning")
"""


@pytest.fixture
def project(tmp_path):
    """start(how many tests make a second pytest worth it, …): a pytest of the tests above."""
    far = FAR.replace("NICENESS", str((os.nice(0), min(19, os.nice(0) + NICE))))    # this pytest may be nice itself
    for name, text in {"near": NEAR, "far": far}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\njunit_family = xunit1\n")
    (tmp_path / "temporary").mkdir()

    def start(least, *flags):
        (tmp_path / "conftest.py").write_text(CONFTEST.format(least=least))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        path = str(Path(__file__).parents[2])
        return subprocess.Popen([sys.executable, "-m", "pytest", "-q", "--junitxml", "told.xml", *flags], cwd=tmp_path,
                                env=environment | {"PYTHONPATH": path, "TMPDIR": str(tmp_path / "temporary")},
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                # What a shell starts in the background is to ignore Ctrl-C.
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return tmp_path, start


def told(folder):
    """{(file, test): (its outcome, the first line of why, its process)}."""
    found = {}
    for case in ElementTree.parse(folder / "told.xml").iter("testcase"):
        outcomes = [(part.tag, part.get("message")) for part in case if part.tag in ("failure", "error", "skipped")]
        process = [one.get("value") for one in case.iter("property")]
        found[case.get("classname"), case.get("name")] = outcomes, process
    return found


def test_what_runs_aside_is_told_as_if_it_had_run_here(project):
    folder, start = project
    results = {}
    for least in (1, 100):
        process = start(least)
        said = process.communicate(timeout=180)[0]
        assert process.returncode == 1, said
        for text in ("what it printed", "assert [1, 2] == [1, 3]", "KeyError: 'of the fixture'", "a word of warning",
                     "1 failed, 5 passed, 1 skipped, 1 xfailed, 1 warning, 1 error"):
            assert text in said, said
        results[least] = told(folder)
    two, one = results[1], results[100]
    assert {test: outcomes for test, (outcomes, _) in two.items()} == {test: how for test, (how, _) in one.items()}
    assert len(two) == 9 and list(two)[0][0] == "near.test_near", "those aside come last"
    processes = [{process for (where, _), (_, [process]) in found.items() if where == f"{folder}.test_{folder}"}
                 for found in (two, one) for folder in ("near", "far")]
    assert all(len(found) == 1 for found in processes)
    assert processes[0] != processes[1] and processes[2] == processes[3]
    assert not list((folder / "temporary").glob("aside-*"))


def test_a_name_that_is_another_in_each_process_is_refused(project):
    """Told when the tests are collected, not when the first of them is awaited."""
    folder, start = project
    far = folder / "far" / "test_far.py"
    far.write_text(far.read_text() + "\n@pytest.mark.parametrize('f', [lambda: 0], ids=str)\ndef test_f(f): pass\n")
    said = start(1).communicate(timeout=60)[0]
    assert "test_f[<function <lambda> at 0x" in said and "give its parameters ids" in said and "passed" not in said


def test_a_part_of_the_tests_and_the_first_failure(project):
    folder, start = project
    said = start(1, "-k", "right or warns").communicate(timeout=180)[0]
    assert "5 passed, 2 deselected" in said.replace("4 deselected", "2 deselected"), said
    process = start(1, "-x")
    said = process.communicate(timeout=180)[0]
    assert process.returncode == 1 and "1 failed, 4 passed" in said, said
    assert not list((folder / "temporary").glob("aside-*"))


def test_tests_that_end_their_process_are_not_passed(project):
    folder, start = project
    path = folder / "far" / "test_far.py"
    path.write_text(FAR.replace("def test_wrong():", "def test_wrong():\n    os._exit(0)"))
    process = start(1)
    said = process.communicate(timeout=180)[0]
    assert process.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "the pytest aside has ended with status 0 before it told of far/test_far.py::test_wrong" in said, said


SLOW = """
from minitorch_dist.testing import ranks
def test_slow():
    ranks.launch(["-c", "import os, time; open({pid!r}, 'w').write(str(os.getpid())); time.sleep({seconds})"], 1)
"""


@pytest.mark.parametrize("number, seconds", [(signal.SIGKILL, 2), (signal.SIGINT, 100)])
def test_nothing_is_left_where_the_first_is_ended(project, number, seconds):
    """Killed, it leaves the other to see so at the end of a test; interrupted, it ends the other's ranks."""
    folder, start = project
    (folder / "near" / "test_near.py").write_text(NEAR + "    import time\n    time.sleep(100)\n")
    (folder / "far" / "test_far.py").write_text(SLOW.format(pid=str(folder / "pid"), seconds=seconds))
    process, end = start(1), time.monotonic() + 60
    while not ((folder / "pid").exists() and (folder / "pid").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    rank = int((folder / "pid").read_text())
    process.send_signal(number)
    process.communicate(timeout=180)
    while (ranks.is_alive(rank) or list((folder / "temporary").glob("[ar]*-*"))) and time.monotonic() < end:
        time.sleep(0.05)
    left = {path.name.partition("-")[0] for path in (folder / "temporary").iterdir()}
    assert not ranks.is_alive(rank) and left <= {"pytest"}
