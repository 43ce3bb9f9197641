"""The frame on small exercises of its own: what a learner is told of errors, deadlocks and limits; seeds, slots."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from exercises.frame import Check, child, fence, gives, launch, pictures, seeds
from exercises.frame.answers import Answers
from exercises.frame.checking import check_answer
from exercises.frame.course import Course, CourseError, Exercise
from minitorch_dist.testing import ranks
from tests.parallel.test_offload import file_size_limit


def run(tmp_path, source, cases=None, n=1, drive=None, **fields):
    """Launch an answer f, with cases of its own."""
    path = tmp_path / "answer_file.py"
    path.write_text(source, encoding="utf-8")
    exercise = Exercise("99.1", "99_none", path.name, "f", "a test", kind="ranks" if n > 1 else "plain", **fields)
    return launch.launch(exercise, path, cases or [[{"x": np.arange(3.0)} for _ in range(n)]], n, drive=drive)


# ---------------------------------------------------------------- what goes wrong in an answer

FAILURES = {
    "syntax": ("def f(x):\n    return x +\n", 1, "syntax", ["line 2 of answer_file.py is not Python"]),
    "an exception": ("def g(x):\n    return x[7]\n\ndef f(x):\n    return g(x)\n", 1, "error",
                     ["IndexError", "your line 2: return x[7]"]),
    "an exception on one rank": (
        "def f(comm, x):\n    if comm.rank == 1:\n        x['a']\n    comm.all_reduce(x)\n", 2, "error",
        ["rank 1 of 2: IndexError", "your line 3"]),
    "another name": ("def g(x):\n    return x\n", 1, "error", ["there is no f in the file", "keep the name 'f'"]),
    "wrong arguments": ("def f():\n    pass\n", 1, "error",
                        ["TypeError", "unexpected keyword argument 'x'", "keep its arguments as the skeleton has"]),
    "not begun": ("def f(x):\n    raise NotImplementedError('begin with x')\n", 1, "not begun", ["begin with x"]),
    "mismatched collectives": (
        "import numpy as np\ndef f(comm, x):\n    comm.all_reduce(x if comm.rank else np.zeros(4))\n", 2, "error",
        ["the ranks call different collectives", "all_reduce(float64[4], sum)", "all_reduce(float64[3], sum)",
         "your line 3: comm.all_reduce"]),
    "one has returned": (
        "def f(comm, x):\n    if comm.rank == 0:\n        comm.all_reduce(x)\n", 2, "error",
        ["has returned already", "your line 3"]),
    "deadlock": (
        "def f(comm, x):\n    y = x.copy()\n    comm.recv(y, src=1 - comm.rank)\n    comm.send(x, dst=1 - comm.rank)\n",
        2, "deadlock", ["rank 0 waits in recv(src=1) at your line 3: comm.recv(y, src=1 - comm.rank)",
                     "rank 1 waits in recv(src=0) at your line 3"]),
    "waits for one that has returned": (
        "def f(comm, x):\n    if comm.rank == 0:\n        comm.recv(x, src=1)\n", 2, "deadlock",
        ["rank 0 waits in recv(src=1) at your line 3", "rank 1 has returned already"]),
    "waits for one that computes": (
        "def f(comm, x):\n    if comm.rank == 0:\n        comm.recv(x, src=1)\n    while True:\n        x = x + 1\n", 2,
        "deadlock", ["rank 0 waits in recv(src=1) at your line 3", "rank 1 computes at your line"]),
    "slow, number by number": (
        "def f(comm, x):\n    while True:\n        comm.all_reduce(x[:1])\n", 2, "slow",
        ["no answer within 1 s. No deadlock: the ranks still went from one call to the next, with ", " begun: it was "
         "at your line 3: comm.all_reduce(x[:1])"]),
    "endless": ("def f(x):\n    while True:\n        pass\n", 1, "slow", ["no answer within 1 s", "your line"]),
    "a forbidden import": ("import minitorch_dist.nn\n", 1, "forbidden", ["your line 1 imports minitorch_dist.nn"]),
    "not UTF-8": ("", 1, "syntax", ["UTF-8"]),
    "nested too deeply": ("x = a" + ".a" * 50000 + "\n", 1, "syntax", ["nested too deeply"]),
    "a huge file": ("x = 1\n" * 100000, 1, "syntax", ["600,000 bytes: an answer has at most 262,144"]),
    "a huge line": ("x = '" + "a" * 100000 + "\n", 1, "syntax", ["line 1 of answer_file.py is not Python"]),
    "outputs of 80 MB": ("import numpy as np\ndef f(x):\n    return np.zeros(10 ** 7)\n", 1, "no answer",
                         ["what your answer gave can't be written down (at most 64 MB): OSError"]),
    "outputs that raise": ("class K:\n    def __str__(self):\n        1 / 0\ndef f(x):\n    return {K(): 1}\n", 1,
                           "no answer", ["can't be written down", "ZeroDivisionError"]),
    "pipes for notes": (
        "import os\ndef f(x):\n    for name in ('case-0', 'error-0.json', 'late-0', 'forbidden-0'):\n"
        "        os.remove('../' + name)\n        os.mkfifo('../' + name)\n    os._exit(0)\n", 1, "no answer",
        ["ended before it gave an answer"]),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_told_with_the_learners_line(name, tmp_path, monkeypatch):
    source, n, kind, texts = FAILURES[name]
    if name == "not UTF-8":
        path = tmp_path / "answer_file.py"
        path.write_bytes(b"x = '\xff'\n")
        failure = launch.read_source(path)[-1]
    else:
        failure = run(tmp_path, source, n=n, limit=1.0).failure
    said = "\n".join([failure.message, *failure.details])
    assert failure.kind == kind, said
    for text in texts:
        assert text in said, said
    assert "child.py" not in said and "Traceback" not in said


PASSES_ON = """
class Watched:
    def __init__(self, comm):
        self.comm, self.rank = comm, comm.rank

    def all_reduce(self, x):
        return self.comm.all_reduce(x)


def f(learner, inputs, run):
    learner(Watched(run.comm), inputs["x"])
"""
REPORTS_LATE = """import time, numpy as np
def f(comm, x):
    try:
        comm.all_reduce(x if comm.rank else np.zeros(4))
    finally:
        time.sleep(0 if comm.rank else 2)
"""


def test_calls_that_the_drive_passes_on_are_the_learners_also_of_a_rank_that_is_ended_before_it_reports(tmp_path):
    """The first rank that reports ends the others, which may have had no time to."""
    (tmp_path / "drive.py").write_text(PASSES_ON)
    failure = run(tmp_path, REPORTS_LATE, n=2, drive=tmp_path / "drive.py").failure
    said = "\n".join([failure.message, *failure.details])
    assert said.count("your line 4: comm.all_reduce(x if comm.rank else np.zeros(4))") == 2, said
    assert "drive.py" not in said


HANGS_LATE = ("def f(comm, x, k):\n    if k == 7 and comm.size == 2:\n        comm.recv(x, src=1 - comm.rank)\n"
              "    return x + k\n")
RAISES_LATE = "def f(comm, x, k):\n    if k == 7:\n        x['a']\n"
NEVER_ENDS = "def f(comm, x, k):\n    while k == 7:\n        pass\n"


class Late(Check):
    """The second of three cases has k=7."""

    exercise = "99.1"

    def cases(self, rng, ranks):
        return [[{"x": np.arange(3.0), "k": k} for _ in range(ranks)] for k in (5, 7, 9)]

    def truth(self, case):
        return [{"result": r["x"] + r["k"]} for r in case]


@pytest.mark.parametrize("source, kind", [(HANGS_LATE, "deadlock"), (RAISES_LATE, "error"), (NEVER_ENDS, "slow")])
def test_a_failure_names_its_case(source, kind, tmp_path, monkeypatch):
    path = tmp_path / "f.py"
    path.write_text(source)
    exercise = Exercise("99.1", "99_none", "f.py", "f", "a test", kind="ranks", ranks=(2, 1), limit=1.0)
    monkeypatch.setattr("exercises.frame.checking.checks_of", lambda folder: {"99.1": Late()})
    verdict = check_answer(Course(exercises=tmp_path), exercise, path)
    assert verdict.kind == kind
    assert verdict.details[-1] == "  in case 2 of 3: every rank has k=7, x of shape [3]"
    if kind == "deadlock":
        assert verdict.message.startswith("deadlock on 2 ranks: rank 0 waits in recv(src=1) at your line 3")


@pytest.mark.parametrize(("does", "words"), [
    ("echo the network is down >&2; exit 1", ["mpirun started none of 2 ranks and ended with status 1",
                                              "mpirun says:\n    the network is down"]),
    ("exit 3", ["ended with status 3", "mpirun says nothing"]),
    ("echo where is my daemon; exec sleep 60", [" ranks in ", "mpirun says:\n    where is my daemon"]),
], ids=["says why", "is silent", "hangs"])
def test_a_launcher_that_starts_nobody_speaks(tmp_path, monkeypatch, does, words):
    """Not the learner's program, of which nothing has run."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\n{does}\n")
    mpirun.chmod(0o700)
    monkeypatch.setattr(ranks, "find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr(launch, "STARTING_SECONDS", 0.1)
    failure = run(tmp_path, "def f(comm, x):\n    return x\n", n=2, limit=0.2).failure
    said = "\n".join([failure.message, *failure.details])
    assert failure.kind == "no ranks" and "your answer was never run" in said and "doctor" in said
    assert all(text in said for text in words), said


def test_a_note_of_the_case_that_makes_no_sense_is_left_out(tmp_path):
    (tmp_path / "case-0").write_text("12")
    (tmp_path / "case-1").write_text("-1")
    assert launch._case(tmp_path, 3, 12) is None and launch._case(tmp_path, 3, 13) == 12


def test_no_tree_is_made_where_checks_run(tmp_path, monkeypatch):
    """Python 3.11 can't make two at once, in two threads: launch.imports."""
    def parse(*args, **kwargs):
        raise SystemError("AST constructor recursion depth mismatch")
    source = "import os.path\n\ndef f(x):\n    from . import y\n    from math import (\n        pi, e)\n    return x\n"
    assert list(launch.imports(compile(source, "f", "exec"))) == [(1, ["os.path"]), (5, ["math", "math.pi", "math.e"])]
    monkeypatch.setattr("ast.parse", parse)
    assert run(tmp_path, "def f(x):\n    import math\n    return x\n").failure is None
    assert run(tmp_path, "def f(x):\n    return x +\n").failure.kind == "syntax"
    course = Course()
    for id, wrong in (("03.1", "unbroadcast_averaged"), ("05.1", "linear_weight_transposed")):
        exercise = course.exercise(id)
        path = course.solutions / exercise.folder / "wrong" / f"{wrong}.py"
        assert check_answer(course, exercise, path).kind == "wrong"


def test_ops_can_be_limited(tmp_path):
    source = "def f(comm, x):\n    comm.all_reduce(x)\n"
    failure = run(tmp_path, source, n=2, ops=("send", "recv")).failure
    assert failure.kind == "forbidden" and "comm.all_reduce is not for this exercise: build it from send and recv" in \
        failure.message
    assert run(tmp_path, source, n=2, ops=("all_reduce",)).failure is None


def test_modules_can_be_allowed_and_forbidden_within(tmp_path):
    source = "import minitorch_dist as mt\ndef f(x):\n    return mt.sum(mt.tensor(x)).numpy()\n"
    assert run(tmp_path, source).failure.kind == "forbidden"
    fields = {"allow": ("minitorch_dist",), "forbid": ("minitorch_dist.optim",)}
    assert run(tmp_path, source, **fields).outputs[0][0]["result"] == 3
    for line in ("import minitorch_dist.optim", "from minitorch_dist import optim",
                 "import minitorch_dist as m; m.optim.SGD", "import sys; sys.modules['minitorch_dist.optim.sgd'].SGD"):
        failure = run(tmp_path, f"{line}\n{source}", **fields).failure
        assert failure is not None and failure.kind == "forbidden" and "minitorch_dist.optim" in failure.message, line
    for name, wanted in (("minitorch_dist", False), ("minitorch_dist.nn", False), ("minitorch_dist.optim", True),
                         ("minitorch_dist.optim.adam", True), ("torch.nn", True), ("numpy", False), ("math", False)):
        assert fence.forbidden(name, **fields) == wanted, name


def test_calls_are_recorded_with_line_bytes_and_time(tmp_path):
    source = ("import numpy as np\n\ndef f(comm, x):\n    work = comm.all_reduce(x, async_op=True)\n    work.wait()\n"
              "    if comm.rank:\n        comm.recv(x, src=0)\n    else:\n        comm.send(x, dst=1)\n")
    (first, second), = run(tmp_path, source, n=2).outputs
    assert first.ops() == ["all_reduce", "send"] and second.ops() == ["all_reduce", "recv"]
    assert [call["line"] for call in second.calls] == [4, 7]
    assert [call["peer"] for call in first.calls] == [None, 1] and second.calls[1]["peer"] == 0
    assert all(call["bytes"] == 24 and call["begin"] < call["end"] for call in first.calls + second.calls)
    assert first.sent["send"] == 24 and second.sent["recv"] == 0
    assert abs(first.calls[0]["end"] - second.calls[0]["end"]) < 1, "one clock"


def test_what_was_never_written_is_not_right_by_chance(tmp_path):
    source = ("import numpy as np\ndef f(x):\n"
              "    return {'new': np.empty((2, 3)), 'half': np.empty(2, dtype='float16'), 'like': np.empty_like(x),\n"
              "            'index': np.empty_like(x, np.int32), 'byte': np.empty(shape=3, dtype=np.uint8),\n"
              "            'none': np.empty(0), 'flags': np.empty(4, bool), 'thing': np.empty(1, object)[0]}\n")
    found = run(tmp_path, source).outputs[0][0]["result"]
    for name, shape, dtype, value in (("new", (2, 3), "f8", np.nan), ("half", (2,), "f2", np.nan),
                                      ("like", (3,), "f8", np.nan), ("index", (3,), "i4", 2 ** 31 - 1),
                                      ("byte", (3,), "u1", 255), ("none", (0,), "f8", np.nan)):
        np.testing.assert_array_equal(found[name], np.full(shape, value, dtype), strict=True, err_msg=name)
    assert found["flags"].dtype == bool and found["thing"] is None


def test_values_of_every_kind_travel(tmp_path):
    x = {"a": np.arange(6, dtype=np.int8).reshape(2, 3), "b": [1, 2.5, True, None, "ö"], "c": np.float32(1.5),
         "d": {"e": [np.zeros((0, 3))]}, "g": 2 + 3j, "h": float("nan"), "i": np.array(["x"]), "j": [], "k": {}}
    child.save(tmp_path / "values", x)
    found = child.load(tmp_path / "values")
    for name, value in x.items():
        assert repr(found[name]) == repr(value) or np.array_equal(found[name], value), name
    assert found["a"].dtype == np.int8 and found["d"]["e"][0].shape == (0, 3)
    loop = []
    loop.append(loop)
    child.save(tmp_path / "values", [object(), np.array([None]), {1: loop}])
    found = child.load(tmp_path / "values")
    child.save(tmp_path / "more", {"a": 10 ** 5000, "b": [np.ones(2, "f2"), np.ones(2, np.longdouble)], "c": "\udc80"})
    more = child.load(tmp_path / "more")
    assert repr(more["a"]) == "an object of type long int" and more["c"] == "\udc80"
    assert [x.dtype for x in more["b"]] == [np.float16, np.longdouble]
    tree = b"[%d]" % 10 ** 400
    (tmp_path / "forged").write_bytes(len(tree).to_bytes(8, "little") + tree)
    assert repr(child.load(tmp_path / "forged")) == "[an object of type long int]"
    assert [repr(found[0]), repr(found[1])] == ["an object of type object", "an object of type ndarray of dtype object"]


def test_threads_that_never_end_hold_up_nobody(tmp_path):
    source = ("import threading\ndef f(x):\n    lock = threading.Lock()\n    lock.acquire()\n"
              "    threading.Thread(target=lock.acquire).start()\n    print('said')\n    return x\n")
    launched = run(tmp_path, source, limit=1.0)
    assert launched.failure is None and launched.printed == [["said"]]


# ---------------------------------------------------------------- seeds, slots, course

class Coin(Check):
    """Where x is 0, an answer that gives 2·x can't be told from one that gives x², nor from a right one."""

    signatures = [gives("doubled", lambda case: {"result": 2 * case["x"]}),
                  gives("squared", lambda case: {"result": case["x"] ** 2}),
                  gives("negative", lambda case: {"result": -1 - case["x"]})]

    def cases(self, rng, ranks):
        return [{"x": int(rng.integers(4))}]

    def truth(self, case):
        return {"result": 3 * case["x"]}


def test_mistakes_that_look_alike_with_some_seeds_are_found():
    drawn = {seed: Coin().cases(np.random.default_rng(seed), 1)[0]["x"] for seed in range(40)}
    of = {x: [seed for seed in drawn if drawn[seed] == x] for x in range(4)}
    assert all(of.values())
    found = {(number, n): heard for number, n, heard in seeds.clashes(Coin(), (1,), drawn)}
    assert found == {(0, 1): {"right": of[0], "0": sorted(of[1] + of[2] + of[3])},
                     (1, 1): {"right": sorted(of[0] + of[3]), "0": of[2], "1": of[1]}}


def test_what_a_mistake_gives_is_worked_out_once_for_each_case():
    asked = []

    class Two(Coin):
        signatures = [gives(str(factor), lambda case, factor=factor: asked.append((case["x"], factor)) or {
                          "result": factor * case["x"]}) for factor in (2, 4, 5)]

        def cases(self, rng, ranks):
            return [{"x": 1}, {"x": 7}]
    assert seeds.clashes(Two(), (1,), [0]) == []
    assert sorted(asked) == [(x, factor) for x in (1, 7) for factor in (2, 4, 5)]


@pytest.mark.thorough
def test_many_seeds_in_one_launch_are_told_what_each_is_alone():
    course = Course()
    folder = course.solutions / "08_data_parallel"
    for id, name in (("08.1", "shard.py"), ("08.1", "wrong/shard_seed_plus_epoch.py"),
                     ("08.3", "wrong/gradients_summed.py")):
        exercise, path = course.exercise(id), folder / name
        together = seeds.check_seeds(course, exercise, path, {}, range(3))
        alone = {seed: check_answer(course, exercise, path, seed=seed) for seed in range(3)}
        assert {s: v.text() for s, v in together.items()} == {s: v.text() for s, v in alone.items()}


def test_a_seed_draws_the_same_numbers_again(tmp_path):
    course = Course()
    exercise, wrong = course.exercise("08.3"), course.solutions / "08_data_parallel" / "wrong" / "gradients_summed.py"
    first, second, third = (check_answer(course, exercise, wrong, seed=seed).text() for seed in (3, 3, 4))
    assert first == second != third


def test_slots_give_mine_where_passed(tmp_path):
    course = Course(mine=tmp_path)
    answers = Answers(course)
    found = answers.slots()
    assert {slot: s.whose for slot, s in found.items()} == dict.fromkeys(found, "ours")
    assert found["gradient_sync"].id == "08.3" and found["sampler"].piece(5, 2, 0, 1, 0, 0)
    exercise = course.exercise("08.1")
    answers.begin(exercise)
    path = answers.path(exercise)
    path.write_text("def shard(*a):\n    return 'mine'\n")
    assert answers.slots()["sampler"].whose == "ours", "not passed"
    answers.note_passed(exercise, 1.0)
    slot = answers.slots()["sampler"]
    assert (slot.whose, slot.id, slot.path, slot.piece()) == ("mine", "08.1", path, "mine")
    assert answers.slots("ours")["sampler"].whose == "ours"
    path.write_text("def shard(*a):\n    return 'changed since'\n")
    assert answers.slots()["sampler"].whose == "ours"


def test_names_that_learners_use():
    course = Course()
    for name in ("8", "08", "08_data_parallel", "8 ", "08_data_parallel/"):
        assert [e.id for e in course.find(name)] == ["08.1", "08.2", "08.3", "08.4"], name
    for name in ("08.3", "8.3", "average_gradients", "average_gradients.py", "Average_Gradients"):
        assert [e.id for e in course.find(name)] == ["08.3"], name
    with pytest.raises(CourseError, match="did you mean average_gradients"):
        course.find("average_grads")
    with pytest.raises(CourseError, match="there is no exercise '77'"):
        course.find("77")


CHAPTER = 'title = "t"\nneeds = []\nminutes = 5\n'
ENTRY = CHAPTER + '[[exercise]]\nfile = "a.py"\nobject = "a"\ntitle = "t"\n'


@pytest.mark.parametrize("entry, text", [
    (CHAPTER + "colour = 3\n", "unknown keys"), (ENTRY + 'kind = "odd"\n', "'odd'"), (ENTRY + 'slot = "x"\n', "slot"),
    (ENTRY + "hues = 1\n", "hues")])
def test_a_wrong_chapter_toml_is_refused(entry, text, tmp_path):
    (tmp_path / "03_x").mkdir()
    (tmp_path / "03_x" / "chapter.toml").write_text(entry)
    with pytest.raises(CourseError, match=text):
        Course(exercises=tmp_path).chapters  # noqa: B018


@pytest.mark.parametrize("text", ["{", "[]", '{"01.1": 3}', '{"01.1": {"hints": "3"}}', '{"01.1": {"hints": -3}}'])
def test_a_damaged_progress_file_is_named(tmp_path, text):
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(CourseError, match="progress.json is damaged"):
        Answers(Course(mine=tmp_path)).progress()
    (tmp_path / "progress.json").write_text(json.dumps({"08.1": {"passed": "2026-01-01"}}))
    assert Answers(Course(mine=tmp_path)).passed(Course().exercise("08.1"))


def test_an_account_with_lower_limits_keeps_them():
    """As ulimit sets them: an answer isn't blamed for a limit that can't be raised."""
    lines = ["import os, resource", "from exercises.frame import child",
             "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 6000))",
             "child.set_limits({'limit': 5, 'memory': 3}, open(os.devnull, 'w'))",
             "print(*(resource.getrlimit(kind) for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)))"]
    said = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=Path(__file__).parents[2],
                          capture_output=True, text=True, timeout=60)
    assert said.stdout == f"(6000, 6000) ({3 * 2**30}, {3 * 2**30})\n", said.stderr


def test_a_full_disk_is_told_with_its_file(tmp_path, monkeypatch):
    """Inputs are written into the system's folder for temporary files, pictures into the learner's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with file_size_limit(5_000), pytest.raises(OSError, match=f"File too large: '{tmp_path}/check-"):
        run(tmp_path, "def f(x):\n    return x\n", [[{"x": np.zeros(10_000)}]])
    figure, _ = pictures.canvas()
    with file_size_limit(5_000), pytest.raises(OSError, match=f"File too large: '{tmp_path}/a.png'"):
        pictures.save(figure, tmp_path / "a.png")
