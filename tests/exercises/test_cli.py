"""The learner's command line, as it is typed."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from exercises import cli, rehearse, show
from exercises.frame.answers import Answers
from exercises.frame.course import Course
from minitorch_dist import course as console
from minitorch_dist.testing import ranks as launcher

ROOT = Course().exercises.parent
SOLUTIONS = ROOT / "solutions"


@pytest.fixture
def desk(tmp_path):
    """call("check 08.1") -> (status, what was printed); desk.course, desk.answers, desk.path(id)."""
    course = Course(mine=tmp_path / "mine")

    def call(line):
        stream = io.StringIO()
        return cli.main(line.split(), course, show.Screen(stream)), stream.getvalue()
    answers = Answers(course)
    return types.SimpleNamespace(call=call, course=course, answers=answers,
                                 path=lambda id: answers.path(course.exercise(id)),
                                 ours=lambda id: answers.solution(course.exercise(id)).read_text(encoding="utf-8"))


def test_a_first_evening(desk):
    status, text = desk.call("")
    assert status == 0 and "0 of" in text and "Next: " in text and "README.md" in text
    status, text = desk.call("check 1.2")
    assert status == 1 and "made " in text and "begin with a stack" in text
    assert desk.path("01.2").read_text() == (ROOT / "exercises/01_scalar_reverse_mode/order.py").read_text()
    status, text = desk.call("check 01.2")
    assert status == 1 and "made " not in text
    status, text = desk.call("solution 01.2")
    assert status == 1 and "hasn't passed yet" in text and "missing" not in text
    status, text = desk.call("solution 01.2 --give-up")
    assert status == 0 and "+++ ours" in text and "+    while stack:" in text
    assert desk.answers.known(desk.course.exercise("01.2"))["gave_up"]
    desk.path("01.2").write_text(desk.ours("01.2").replace("done, result", "ready, result").replace("done", "ready"))
    status, text = desk.call("check 01.2")
    assert status == 0 and "passed (" in text
    status, text = desk.call("solution 01.2")
    assert status == 0 and "-    ready, result" in text and "+    done, result" in text
    status, text = desk.call("")
    assert "1/3" in text and f"1 of {len(desk.course.all_exercises)}" in text
    status, text = desk.call("reset 01.2")
    assert status == 0 and len(list(desk.path("01.2").parent.glob("backup/order-*.py"))) == 1
    assert "NotImplementedError" in desk.path("01.2").read_text()
    assert not desk.answers.passed(desk.course.exercise("01.2"))


def test_check_without_a_name_takes_the_next(desk):
    first, second = desk.course.all_exercises[:2]
    desk.answers.begin(first)
    assert f"{first.id} {first.title}: not yet" in desk.call("check")[1]
    desk.path(first.id).write_text(desk.ours(first.id))
    status, text = desk.call("check")
    assert status == 0 and f"{first.id} {first.title}: passed" in text and f"next: {second.id}" in text
    assert f"{second.id} {second.title}: not yet" in desk.call("check")[1]


def test_without_a_name_one_stays_where_one_works(desk):
    """In chapter 8, though chapters before it are open; and back, when a file there is changed."""
    first, title = desk.course.all_exercises[0], desk.course.exercise("08.1").title
    assert f"{first.id}: the first that is open" in desk.call("check")[1]
    desk.answers.begin(desk.course.exercise("08.1"))
    changed(desk, "08.1", 60)
    assert "08.1: the one whose file you changed last\n" in desk.call("hint")[1]
    assert f"Next: 08.1 {title} (the one whose file you changed last)" in desk.call("")[1]
    desk.path("08.1").write_text(desk.ours("08.1"))
    changed(desk, "08.1", 61)
    status, text = desk.call("check")
    assert status == 0 and f"08.1 {title}: passed" in text and "next: 08.2" in text
    assert "08.2: the next after 08.1, whose file you changed last\n" in desk.call("hint")[1]
    changed(desk, first.id, 62)
    assert f"{first.id}: the one whose file you changed last\n" in desk.call("hint")[1]
    desk.path("08.1").write_text(desk.ours("08.1") + "\n")      # passed, and not as it stands
    changed(desk, "08.1", 63)
    assert desk.answers.next()[0].id == "08.1"


def changed(desk, id, minutes):
    """As if the file were saved so many minutes from now."""
    at = time.time() + 60 * minutes
    os.utime(desk.path(id), (at, at))


def test_after_the_last_exercise_comes_the_first_that_is_open(desk):
    last = desk.course.all_exercises[-1]
    desk.answers.begin(last)
    desk.answers.note_passed(last, 1.0)
    assert desk.answers.next() == (desk.course.all_exercises[0], "the first that is open")
    for exercise in desk.course.all_exercises:
        desk.answers.begin(exercise)
        desk.answers.note_passed(exercise, 1.0)
    assert desk.answers.next() == (None, "")


def test_a_chapter_is_checked_to_its_first_gap(desk):
    for id in ("08.1", "08.2"):
        desk.answers.begin(desk.course.exercise(id))
        desk.path(id).write_text(desk.ours(id))
    status, text = desk.call("check 8")
    assert status == 1 and "08.2 One start for all: passed" in text and "08.3" in text and "08.4" not in text


def test_earlier_answers_are_mine_where_passed(desk):
    for id in ("08.2", "08.3", "08.4"):
        desk.answers.begin(desk.course.exercise(id))
        desk.path(id).write_text(desk.ours(id))
    assert "built upon 08.2 (ours), 08.3 (ours)" in desk.call("check 08.4")[1]
    assert desk.call("check 08.2")[0] == 0
    status, text = desk.call("check 08.4")
    assert status == 0 and "built upon 08.2 (mine), 08.3 (ours)" in text
    assert "picture: " in text and (desk.path("08.4").parent / "pictures" / "08.4.png").stat().st_size > 5000
    assert "built upon 08.2 (ours)" in desk.call("check 08.4 --with ours")[1]


def test_a_picture_that_cannot_be_drawn_takes_nothing_away(desk, monkeypatch):
    desk.answers.begin(desk.course.exercise("08.1"))
    desk.path("08.1").write_text(desk.ours("08.1"))

    def broken(*_):
        raise IndexError("an odd but right answer")
    monkeypatch.setattr(cli, "draw", broken)
    status, text = desk.call("check 08.1")
    assert status == 0 and desk.answers.passed(desk.course.exercise("08.1"))
    text = " ".join(text.split())
    assert "has passed; its picture can't be drawn" in text and "IndexError: an odd but right answer" in text


def test_prints_and_the_seed_are_shown(desk):
    desk.answers.begin(desk.course.exercise("08.3"))
    desk.path("08.3").write_text("def average_gradients(comm, grads, count):\n"
                                 "    print('I have', count, '\\x1b[31m')\n")
    status, text = desk.call("check 08.3 --seed 7")
    assert status == 1 and "on rank 1:" in text and "I have 8" in text and "--seed 7" in text
    assert "\x1b" not in text


def test_hints_come_one_by_one(desk):
    counts = [desk.call("hint 08.3")[1].count("\n  ") for _ in range(5)]
    assert "(1 of 2 hints; the next call shows one more)" in desk.call("hint 08.2")[1]
    assert "(2 of 2 hints)" in desk.call("hint 08.2")[1]
    assert counts[0] < counts[1] < counts[2] < counts[3] == counts[4]


@pytest.mark.parametrize("line, text", [
    ("check 99", "there is no exercise '99'. The chapters are 00, 01"), ("check 08.9", "did you mean 08."),
    ("reset 08", "one exercise at a"),
    ("reset 08.1", "nothing to reset"), ("grade /nowhere", "there is no folder"),
    ("check elsewhere/value.txt", "there is no exercise 'elsewhere/value.txt'"),
])
def test_unfriendly_calls_get_a_sentence(desk, line, text):
    status, said = desk.call(line)
    assert status == 2 and text in said and "Traceback" not in said


@pytest.mark.parametrize("command", ["check", "grade ."])
def test_seeds_are_not_negative(desk, command, capsys):
    with pytest.raises(SystemExit):
        desk.call(f"{command} --seed -1")
    assert "--seed: -1: must be at least 0" in capsys.readouterr().err


def test_a_name_may_be_a_path(desk):
    for text in ("mine/08_data_parallel/shard.py", str(desk.path("08.1")), "08_data_parallel/shard.py", "shard.py"):
        assert [exercise.id for exercise in desk.course.find(text)] == ["08.1"]
    assert len(desk.course.find("mine/08_data_parallel/")) == 4
    assert [exercise.id for exercise in desk.course.find("mine/01_scalar_reverse_mode/order.py")] == ["01.2"]


@pytest.mark.parametrize("line", ["check 1.1", "watch 1.1", "hint 1.1", "solution 1.1 --give-up"])
def test_answers_that_cannot_be_written(tmp_path, line):
    (tmp_path / "mine").write_text("a file")
    said = io.StringIO()
    assert cli.main(line.split(), Course(mine=tmp_path / "mine"), show.Screen(said)) == 2
    assert said.getvalue().startswith(str(tmp_path / "mine")) and said.getvalue().count("\n") == 1


@pytest.mark.parametrize("put", [Path.mkdir, lambda path: path.symlink_to("gone")], ids=["folder", "link"])
def test_what_is_no_file_is_not_written_through(desk, put):
    desk.path("01.1").parent.mkdir(parents=True)
    put(desk.path("01.1"))
    status, text = desk.call("check 1.1")
    assert status == 2 and "move it away" in text
    assert not (desk.path("01.1").parent / "gone").exists()


def test_an_answer_in_another_encoding_is_compared_and_kept(desk):
    desk.answers.begin(desk.course.exercise("01.2"))
    desk.path("01.2").write_bytes("# größer\n".encode("latin-1"))
    assert desk.call("check 1.2")[0] == 1
    status, text = desk.call("solution 1.2 --give-up")
    assert status == 0 and "-# gr" in text
    desk.call("reset 1.2")
    assert next(desk.path("01.2").parent.glob("backup/*")).read_bytes() == "# größer\n".encode("latin-1")


def test_each_reset_has_a_backup_of_its_own(desk):
    """Of however many within a second."""
    desk.answers.begin(desk.course.exercise("08.1"))
    for number in range(4):
        desk.path("08.1").write_text(f"# {number}\n")
        desk.call("reset 08.1")
    kept = {path.read_text() for path in desk.path("08.1").parent.glob("backup/shard-*.py")}
    assert kept == {f"# {number}\n" for number in range(4)}


def test_what_two_commands_note_at_once_is_all_there(desk, monkeypatch):
    """As `hint` does while `watch` notes what has passed."""
    read = Answers.progress

    def slow(answers):
        found = read(answers)
        time.sleep(0.02)
        return found
    monkeypatch.setattr(Answers, "progress", slow)
    exercises = desk.course.all_exercises[:8]
    threads = [threading.Thread(target=desk.answers.note, args=(exercise,), kwargs={"hints": 1})
               for exercise in exercises]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(desk.answers) == {exercise.id: {"hints": 1} for exercise in exercises}


def test_what_is_saved_during_a_check_has_not_passed(desk, monkeypatch):
    exercise, check = desk.course.exercise("08.1"), cli.check_answer
    desk.answers.begin(exercise)
    desk.path("08.1").write_text(desk.ours("08.1"))

    def saved_meanwhile(*args):
        found = check(*args)
        desk.path("08.1").write_text("def shard(comm): half-writ")
        return found
    monkeypatch.setattr(cli, "check_answer", saved_meanwhile)
    assert desk.call("check 08.1")[0] == 0
    assert not desk.answers.usable(exercise) and desk.answers.choose(exercise)[1] == "ours"


def test_a_syntax_error_and_a_removed_file(desk):
    exercise = desk.course.exercise("08.1")
    desk.answers.begin(exercise)
    desk.path("08.1").write_text("def shard(:\n")
    status, text = desk.call("check 08.1")
    assert status == 1 and "line 1 of shard.py is not Python" in text and "def shard(:" in text
    desk.path("08.1").write_text(desk.ours("08.1"))
    assert desk.call("check 08.1")[0] == 0
    desk.path("08.1").unlink()
    status, text = desk.call("check 08.1")
    assert "again (it was gone; progress is kept)" in text and desk.answers.passed(exercise)
    assert desk.answers.choose(exercise)[1] == "ours"


def test_needs_are_a_note(desk):
    assert "haven't finished; go on if you like" in desk.call("check 08.1")[1] or \
        not any(chapter.number == 7 for chapter in desk.course.chapters)


def test_no_mpirun(desk, monkeypatch):
    def missing():
        raise RuntimeError("no mpirun beside this python")
    monkeypatch.setattr(cli.launcher, "find_mpirun", missing)
    status, text = desk.call("check 08.2")
    assert status == 2 and "runs on several processes: no mpirun" in text
    assert desk.call("check 08.1")[0] == 1


def test_watch_checks_on_save_and_goes_on(desk):
    desk.answers.begin(desk.course.exercise("01.2"))

    def write_later():
        time.sleep(1.5)
        desk.path("01.2").write_text("def order(root):\n    return [root]\n")
        time.sleep(4)       # until that has been checked, on a busy machine too
        desk.path("01.2").write_text(desk.ours("01.2"))
    desk.answers.note(desk.course.exercise("01.1"), passed="before")
    desk.answers.note(desk.course.exercise("01.3"), passed="before")
    writer = threading.Thread(target=write_later)
    writer.start()
    status, text = desk.call("watch 1")
    writer.join()
    assert status == 0 and text.count("not yet") == 2 and "are missing: root was computed" in text
    assert text.rstrip().endswith("All passed.")


# ---------------------------------------------------------------- as a process

def shell(*line, cwd=ROOT, **environment):
    return subprocess.run([sys.executable, *line], cwd=cwd, capture_output=True, text=True, timeout=60,
                          env=os.environ | environment)


def test_piped_output_has_no_escape_codes(tmp_path):
    found = shell("-m", "exercises", MINITORCH_MINE=str(tmp_path), FORCE_COLOR="")
    assert found.returncode == 0 and "\x1b" not in found.stdout and "Next: " in found.stdout and not found.stderr
    found = shell("-m", "exercises", MINITORCH_MINE=str(tmp_path), PYTHONIOENCODING="ascii")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("columns", [40, 60, 80, 110])
def test_nothing_is_wider_than_the_terminal(desk, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(show, "near", lambda path: path.name)
    table = desk.call("")[1].split("\n\n")[0].splitlines()
    assert len(table) == 1 + len(desk.course.chapters) and max(map(len, table)) <= columns
    assert ("needs" in table[0]) == (columns >= 60) and "Reverse mode on" in table[2]
    desk.answers.begin(desk.course.exercise("07.1"))
    desk.path("07.1").write_text("def exchange(comm, outgoing, dst, incoming, src):\n    1 / 0\n")
    said = [line for line in desk.call("check 07.1")[1].splitlines() if "--seed" not in line and "without" not in line]
    place = next(i for i, line in enumerate(said) if line.startswith("  in case 1"))
    assert max(map(len, said)) <= columns and said[place + 1].startswith("    ") and len(said) > place + 2


@pytest.mark.parametrize("environment, coloured", [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_a_terminal_gets_colours_unless_it_wants_none(tmp_path, environment, coloured):
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen([sys.executable, "-m", "exercises"], cwd=ROOT, stdout=theirs, stderr=theirs,
                               env=clean | {"TERM": "xterm", "MINITORCH_MINE": str(tmp_path)} | environment)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait(30) == 0
    assert (b"\x1b[" in said) == coloured and b"Next: " in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("exercise", ["01.2", "07.1"])
def test_a_check_that_is_ended_ends_the_answer(tmp_path, exercise, number):
    answers = Answers(Course(mine=tmp_path))
    answers.begin(answers.course.exercise(exercise))
    answers.path(answers.course.exercise(exercise)).write_text("print('here')\nwhile True: pass\n")

    def as_usual():     # also where a shell has it ignored
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    with subprocess.Popen([sys.executable, "-m", "exercises", "check", exercise], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, preexec_fn=as_usual,
                          env=os.environ | {"MINITORCH_MINE": str(tmp_path), "TMPDIR": str(tmp_path)}) as process:
        while process.poll() is None and not any("here" in p.read_text() for p in tmp_path.glob("ranks-*/rank-*.out")):
            time.sleep(0.01)
        pids = [int(text) for path in tmp_path.glob("ranks-*/rank-*.pid") if (text := path.read_text().strip())]
        process.send_signal(number)
        said = process.stdout.read()
        assert process.wait(30) == 128 + number and "Traceback" not in said, said
    assert pids and not any(map(launcher.is_alive, pids))


def test_the_console_command_finds_the_course(tmp_path, monkeypatch):
    assert console.find(ROOT / "tests" / "exercises") == ROOT and console.find("/") is None
    program = "import sys; from minitorch_dist.course import main; sys.argv[1:] = ['map']; main()"
    found = shell("-c", program, cwd=ROOT / "docs", MINITORCH_MINE=str(tmp_path))
    assert found.returncode == 0 and "Next: " in found.stdout, found.stderr
    assert "minitorch-exercises check" in found.stdout
    found = shell("-c", program, cwd=tmp_path)
    assert found.returncode == 1 and "no course here" in found.stderr


def test_grade_json(tmp_path):
    folder = tmp_path / "hand-in" / "carla" / "mine" / "08_data_parallel"
    folder.mkdir(parents=True)
    (folder / "shard.py").write_text((SOLUTIONS / "08_data_parallel" / "shard.py").read_text())
    (folder / "broadcast_parameters.py").write_text("def broadcast_parameters(comm, parameters): pass\n")
    found = shell("-m", "exercises", "grade", str(tmp_path / "hand-in"), "--json", "--only", "8", "--seed", "3")
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(line["student"], line["exercise"], line["passed"]) for line in lines] == [
        ("carla", "08.1", True), ("carla", "08.2", False), ("carla", "08.3", False), ("carla", "08.4", False)]
    assert set(lines[0]) == {"student", "exercise", "passed", "kind", "message", "seconds"}
    assert lines[1]["message"].startswith("each rank still has its own parameters")
    assert lines[2]["kind"] == "missing" and lines[0]["seconds"] > 0


def test_grade_names_what_is_no_text(tmp_path):
    """Students' folders whose names are not UTF-8 stay apart; an answer with a null byte; .git is no student, nor is
    what an archive of macOS has beside the files."""
    for name in (b"j\xf6rg", b"j\xfcrg"):
        folder = tmp_path / os.fsdecode(name) / "08_data_parallel"
        folder.mkdir(parents=True)
        (folder / "shard.py").write_bytes(b"def shard():\n    pass\n\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / "__MACOSX" / "ann" / "00_demo").mkdir(parents=True)
    said = subprocess.run([sys.executable, "-m", "exercises", "grade", str(tmp_path), "--json", "--only", "08.1"],
                          cwd=ROOT, capture_output=True, timeout=60).stdout
    lines = [json.loads(line) for line in said.decode().splitlines()]
    assert [line["student"] for line in lines] == [r"j\xf6rg", r"j\xfcrg"]
    assert all(line["message"].startswith("shard.py is not Python: ") for line in lines)


def test_rehearse_draws_into_the_learners_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINITORCH_MINE", str(tmp_path / "elsewhere"))
    everything = rehearse.files
    monkeypatch.setattr(rehearse, "files", lambda *which: everything(*which)[:2])
    assert rehearse.main(["02.2"]) == 0
    assert (tmp_path / "elsewhere" / "rehearse.png").stat().st_size > 2000
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("    02.2 solution [") and said[2].startswith("    02.2 skeleton [")
    assert rehearse.main(["02.2", "--seeds", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["    02.2 solution: as it should be with 3 of 3 seeds",
                                                    "    02.2 skeleton: as it should be with 3 of 3 seeds"]
    assert rehearse.main(["77"]) == 2


def test_rehearse_names_what_is_not_as_it_should_be(tmp_path, monkeypatch, capsys):
    wrong = SOLUTIONS / "02_dual_numbers" / "wrong" / "jacobian_transposed.py"
    monkeypatch.setattr(rehearse, "files", lambda *which: [("wrong/x", wrong, "another sentence")])
    assert rehearse.main(["02.2", "--seeds", "2"]) == 1
    said = capsys.readouterr().out
    assert ">>> 02.2 wrong/x: as it should be with 0 of 2 seeds" in said and ">>> expected: another sentence" in said


def test_nothing_is_written_into_the_course(desk):
    before = {path: path.stat().st_mtime_ns for path in Path(ROOT / "exercises").rglob("*")
              if "__pycache__" not in str(path) and path.parent.name.startswith(("01", "08"))}
    desk.call("check 08.3")
    desk.call("hint 08.3")
    after = {path: path.stat().st_mtime_ns for path in before}
    assert before == after
