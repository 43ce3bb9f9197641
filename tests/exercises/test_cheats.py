"""What an answer may try instead of being right. Each is tried on the real checks of chapter 8, as a student's file."""

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from exercises.frame import launch
from exercises.frame.answers import ours
from exercises.frame.checking import check_answer
from exercises.frame.course import Course
from minitorch_dist.testing import ranks

from ..quick import asked

COURSE = Course()
ROOT = COURSE.exercises.parent
SOLUTION = COURSE.solutions / "08_data_parallel" / "average_gradients.py"
LIBRARY = ROOT / "minitorch_dist" / "comm" / "communicator.py"
HEAD = "import os\nimport sys\nimport numpy as np\n"
EMPTY = "def average_gradients(comm, grads, count):\n    pass\n"
WEIGHTED = "def average_gradients(comm, grads, count):\n    for g in grads:\n        g *= count\n"

# name: (source of the answer to 08.3, kind of the verdict or several, a text in it)
CHEATS = {
    "NumPy's comparisons patched": (
        HEAD + "np.allclose = lambda *a, **k: True\nnp.array_equal = np.isclose = np.all = np.allclose\n" + EMPTY,
        "wrong", "each rank still has its own gradients"),
    "nothing right but the word": (
        HEAD + "print('PASS')\nprint('{\"passed\": true}')\nprint('passed', file=sys.stderr)\n" + EMPTY, "wrong", ""),
    "os._exit(0)": (HEAD + "def average_gradients(comm, grads, count):\n    os._exit(0)\n", "no answer", "ended"),
    "os._exit(0) on import": (HEAD + "os._exit(0)\n", "no answer", "ended"),
    "os._exit(0) on one rank": (
        HEAD + "def average_gradients(comm, grads, count):\n    if comm.rank: os._exit(0)\n"
        "    comm.all_reduce(grads[0])\n",
        "no answer", "rank 1 of 2"),
    "sys.exit(0)": (HEAD + "def average_gradients(comm, grads, count):\n    sys.exit(0)\n", "no answer", "SystemExit"),
    "killed": (
        HEAD + "import signal\ndef average_gradients(comm, grads, count):\n    os.kill(os.getpid(), signal.SIGKILL)\n",
        "no answer", "ended"),
    "the library's answer imported": (
        HEAD + "from minitorch_dist.parallel import DistributedDataParallel\n" + EMPTY, "forbidden",
        "your line 4 imports minitorch_dist.parallel"),
    "imported when called": (
        HEAD + "import importlib\ndef average_gradients(comm, grads, count):\n"
        "    importlib.import_module('minitorch_dist.parallel').DistributedDataParallel\n", "forbidden",
        "minitorch_dist.parallel"),
    "taken from sys.modules": (
        HEAD + "def average_gradients(comm, grads, count):\n"
        "    sys.modules['minitorch_dist.parallel'].DistributedDataParallel\n", "forbidden", "minitorch_dist.parallel"),
    "found by another module's hand": (
        HEAD + "import pkgutil\ndef average_gradients(comm, grads, count):\n"
        "    pkgutil.resolve_name('minitorch_dist.parallel:DistributedDataParallel')\n", "forbidden",
        "minitorch_dist.parallel"),
    "mpi4py behind the communicator": (
        HEAD + "def average_gradients(comm, grads, count):\n    name = 'mpi4' + 'py'\n    __import__(name).MPI\n",
        "forbidden", "mpi4py"),
    "the solution imported": (
        HEAD + f"sys.path.insert(0, {str(SOLUTION.parent)!r})\nname = 'broadcast_parameters'\n"
        "average_gradients = getattr(__import__(name), name)\n", "forbidden", "solution"),
    "the solution read": (HEAD + f"exec(open({str(SOLUTION)!r}).read())\n", "forbidden", "touches"),
    "the solution read, the refusal caught": (
        HEAD + f"try:\n    open({str(SOLUTION)!r})\nexcept BaseException:\n    pass\n" + EMPTY, "forbidden", "touches"),
    "the solution read by its number": (
        HEAD + f"fd = os.open({str(SOLUTION)!r}, os.O_RDONLY)\nexec(os.read(fd, 10000))\n", "forbidden", "touches"),
    "the solution read by another program": (
        HEAD + f"import subprocess\nexec(subprocess.check_output(['cat', {str(SOLUTION)!r}]))\n", "forbidden",
        "another program"),
    "the solution read by way of a folder that is open": (
        HEAD + f"fd = os.open({str(SOLUTION.parents[2])!r}, os.O_RDONLY)\n"
        f"fd = os.open({'/'.join(SOLUTION.parts[-3:])!r}, os.O_RDONLY, dir_fd=fd)\nexec(os.read(fd, 10000))\n",
        "forbidden", "touches"),
    "the solution read by a path with methods of its own": (
        HEAD + "class Path(str):\n    def startswith(self, *args): return False\n    def __str__(self): return '/'\n"
        f"exec(open(Path({str(SOLUTION)!r})).read())\n", "forbidden", "touches"),
    "what paths are looked at with, patched": (
        HEAD + "os.path.realpath = os.readlink = os.fsdecode = lambda path, **kwargs: '/'\n"
        f"import stat\nstat.S_ISLNK = lambda mode: False\nexec(open({str(SOLUTION)!r}).read())\n",
        "forbidden", "touches"),
    "isinstance patched": (
        HEAD + "import builtins\nreal, builtins.isinstance = isinstance, lambda *args: False\n"
        f"text = open({str(SOLUTION)!r}).read()\nbuiltins.isinstance = real\nexec(text)\n", "forbidden", "touches"),
    "the fence's names and methods patched": (
        HEAD + "module = sys.modules['__main__']\nfor name, value in list(vars(module).items()):\n"
        "    if isinstance(value, tuple) and 'open' in value: setattr(module, name, ())\n"
        "    if name == 'Fence': value.by_the_library = lambda self: True\n"
        f"exec(open({str(SOLUTION)!r}).read())\n", "forbidden", "touches"),
    "the fence looked for": (
        HEAD + "import gc\nfor each in gc.get_objects():\n    if type(each).__name__ == 'Fence': each.folders = ()\n"
        f"exec(open({str(SOLUTION)!r}).read())\n", "forbidden", "gc.get_objects"),
    "the solution loaded by the child's own hand": (
        HEAD + f"import __main__\n__main__.load_module({str(SOLUTION)!r}, 'x')\n" + EMPTY, "forbidden", "touches"),
    "code that says it is the library's": (
        HEAD + f"code = compile('text = open(path).read()', {str(LIBRARY)!r}, 'exec')\n"
        f"names = {{'path': {str(SOLUTION)!r}}}\nexec(code, names)\nexec(names['text'])\n", "forbidden",
        "makes code that says it is of"),
    "code renamed to be the library's": (
        HEAD + f"def read():\n    return open({str(SOLUTION)!r}).read()\n"
        f"read.__code__ = read.__code__.replace(co_filename={str(LIBRARY)!r})\nexec(read())\n", "forbidden",
        "makes code that says it is of"),
    "the grader killed": (
        HEAD + "import signal\ndef average_gradients(comm, grads, count):\n    os.kill(os.getppid(), signal.SIGKILL)\n",
        "forbidden", "sends a signal"),
    "a link to the solution": (
        HEAD + f"import tempfile\nplace = tempfile.mkdtemp() + '/linked'\nos.link({str(SOLUTION)!r}, place)\n"
        "exec(open(place).read())\n", "forbidden", "touches"),
    "a file moved among the solutions": (
        HEAD + "import tempfile\nplace = tempfile.mkstemp()[1]\n"
        f"os.rename(place, {str(SOLUTION.with_name('nobody.py'))!r})\n" + EMPTY, "forbidden", "touches"),
    "the check rewritten": (
        HEAD + f"open({str(ROOT / 'exercises' / '08_data_parallel' / 'check.py')!r}, 'a').write('')\n" + EMPTY,
        "forbidden", "touches"),
    "the progress written": (
        HEAD + f"open({str(ROOT / 'mine' / 'progress.json')!r}, 'w').write('')\n" + EMPTY, "forbidden", "touches"),
    "the outputs written by hand": (
        HEAD + "box = os.path.dirname(os.getcwd())\nfor r in range(4):\n"
        "    open(f'{box}/out-{r}.values', 'wb').write((2).to_bytes(8, 'little') + b'[]')\nos._exit(0)\n",
        ("no answer", "wrong"), ""),
    "outputs that would be objects at any address": (
        HEAD + "box = os.path.dirname(os.getcwd())\ntree = b'[{\"array\": [\"|O\", [1]]}]'\nfor r in range(4):\n"
        "    open(f'{box}/out-{r}.values', 'wb').write(len(tree).to_bytes(8, 'little') + tree + b'x' * 8)\n"
        "os._exit(0)\n", "no answer", "can't be read: no array of object"),
    "the other ranks' inputs read": (
        HEAD + "box = os.path.dirname(os.getcwd())\ndef average_gradients(comm, grads, count):\n"
        "    print([n for n in sorted(os.listdir(box)) if n.startswith('in-')])\n    open(f'{box}/in-0.values')\n",
        "error", "FileNotFoundError"),
    "the hooks taken off": (
        HEAD + "def average_gradients(comm, grads, count):\n    comm.hooks.clear()\n    for g in grads:\n"
        "        comm.all_reduce(g)\n", "wrong", "summed"),
    "every exception caught": (
        HEAD + "def average_gradients(comm, grads, count):\n    while True:\n        try:\n"
        "            while True: pass\n"
        "        except BaseException: pass\n", "slow", "no answer within"),
    "the alarm put off": (
        HEAD + "import signal, faulthandler\ndef average_gradients(comm, grads, count):\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0)\n    faulthandler.cancel_dump_traceback_later()\n"
        "    while True: pass\n", "slow", "no answer within"),
    "more memory than there is": (
        HEAD + "def average_gradients(comm, grads, count):\n    np.empty(1 << 29)\n", "error", "emoryError"),
    "noise without end": (
        HEAD + "def average_gradients(comm, grads, count):\n    while True: print('x' * 100000)\n",
        ("slow", "error", "no answer"), ""),
    "strange outputs": (
        HEAD + "def average_gradients(comm, grads, count):\n"
        "    grads[:] = ['a', None, {'b': [object()]}, np.array(['x'])]\n",
        "wrong", "grads"),
}
SLOW = "the alarm put off"      # this one lives as long as the launcher lets it


@pytest.fixture(autouse=True, scope="module")
def short_start():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "STARTING_SECONDS", 4)
        yield


@pytest.fixture(scope="module")
def verdicts(request, short_start, tmp_path_factory):
    """{name: future of the Verdict} of those that are asked for, three at a time, for most of them wait; the slowest
    first."""
    cheats = [name for name, in asked(request, "name")]

    def check(name, folder):
        answer = folder / "average_gradients.py"
        answer.write_text(CHEATS[name][0])
        return check_answer(COURSE, COURSE.exercise("08.3"), answer, limit=1.0, memory=2.0)
    with ThreadPoolExecutor(3) as pool:
        # pytest's folders are not for threads: two that ask for the first one each get a place of their own for all.
        yield {name: pool.submit(check, name, tmp_path_factory.mktemp("cheat"))
               for name in sorted(cheats, key=lambda name: (name != SLOW, name))}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_rejected(name, verdicts):
    _, kinds, text = CHEATS[name]
    check = (ROOT / "exercises" / "08_data_parallel" / "check.py").read_bytes()
    verdict = verdicts[name].result()
    assert not verdict.passed, verdict
    assert verdict.kind in kinds and text in verdict.text(), verdict.text()
    assert verdict.seconds < 8 * launch.patience()
    assert (ROOT / "exercises" / "08_data_parallel" / "check.py").read_bytes() == check


def test_no_process_and_no_file_is_left(tmp_path, monkeypatch, verdicts):
    wait(verdicts.values())     # TMPDIR is the process's: checks that are still under way would put their folders there
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    answer = tmp_path / "average_gradients.py"
    answer.write_text("import os, time\nprint(os.getpid())\n" + EMPTY.replace("pass", "time.sleep(100)"))
    verdict = check_answer(COURSE, COURSE.exercise("08.3"), answer, limit=0.5)
    assert verdict.kind == "slow"
    pids = [int(lines[0]) for lines in verdict.printed]
    assert len(pids) == 2 and not [pid for pid in pids if ranks.is_alive(pid)]
    assert list(tmp_path.iterdir()) == [answer]


def test_the_environment_is_clean_and_the_folder_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "42")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "solutions"))
    answer = tmp_path / "shard.py"
    answer.write_text("import os, sys, json\n"
                      "print(json.dumps([os.environ.get('A_SECRET'), os.listdir('.'), sys.path, "
                      "sys.flags.isolated]))\n"
                      "def shard(*a): return []\n")
    secret, files, path, isolated = json.loads(check_answer(COURSE, COURSE.exercise("08.1"), answer).printed[0][0])
    assert secret is None and files == [] and isolated
    assert not [p for p in path if "solutions" in p or p in ("", str(ROOT))]


def test_grading_needs_no_solutions_and_no_checks_of_the_student(tmp_path):
    from exercises.grade import grade, students
    student = tmp_path / "eve"
    for file in ("broadcast_parameters.py", "average_gradients.py", "train.py"):
        path = student / "08_data_parallel" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((COURSE.solutions / "08_data_parallel" / file).read_bytes())
    (student / "08_data_parallel" / "check.py").write_text("raise SystemExit('edited')")
    (student / "08_data_parallel" / "shard.py").write_text("def shard(*a): return []\n")
    (student / "progress.json").write_text('{"08.1": {"passed": "2026-01-01"}}')
    course = Course(solutions=tmp_path / "nowhere")
    assert students(tmp_path, course) == {"eve": student}
    results = {r["exercise"]: r for r in grade(course, course.find("8"), student, seed=5)}
    assert [r["passed"] for r in results.values()] == [False, True, True, True], results
    (student / "08_data_parallel" / "average_gradients.py").write_text(EMPTY)
    results = {r["exercise"]: r for r in grade(course, course.find("8")[2:], student)}
    assert results["08.4"]["kind"] == "needs" and "08.3" in results["08.4"]["message"]


def test_grading_follows_no_link_and_goes_on_when_a_check_fails(tmp_path, monkeypatch):
    from exercises import grade
    folder = tmp_path / "eve" / "08_data_parallel"
    folder.mkdir(parents=True)
    (folder / "shard.py").symlink_to(COURSE.solutions / "08_data_parallel" / "shard.py")
    (folder / "broadcast_parameters.py").mkdir()
    os.mkfifo(folder / "average_gradients.py")
    (folder / "train.py").write_text("")

    def fails(*args, **kwargs):
        raise OverflowError("int too large")
    monkeypatch.setattr(grade, "check_answer", fails)
    found = list(grade.grade(COURSE, COURSE.find("8"), tmp_path / "eve"))
    assert [result["kind"] for result in found] == ["no answer", "missing", "missing", "check failed"]
    assert "is not what was handed in" in found[0]["message"] and "OverflowError: int too large" in found[3]["message"]
    (tmp_path / "class").symlink_to(tmp_path / "eve")
    assert grade.students(tmp_path / "class", COURSE) == {"eve": tmp_path / "class"}


def test_without_the_fence_the_cheats_would_work(tmp_path):
    """The closed folders are what stops them, not something else: an open folder can be read."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "text").write_text("from the open folder")
    answer = tmp_path / "shard.py"
    answer.write_text(f"print(open({str(tmp_path / 'open' / 'text')!r}).read())\ndef shard(*a): return []\n")
    exercise = COURSE.exercise("08.1")
    assert check_answer(COURSE, exercise, answer).printed == [["from the open folder"]]
    assert ours(COURSE, exercise) == {} and os.path.isdir(COURSE.solutions)
