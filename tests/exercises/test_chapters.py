"""Every chapter that there is: solutions pass, skeletons say where to begin, known mistakes are told what they are."""

import ast
import collections
import itertools
import re
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from exercises import build
from exercises.frame import launch
from exercises.frame.answers import ours
from exercises.frame.checking import check_answer, checks_of, draw
from exercises.frame.course import Course
from exercises.frame.starting import Starters
from exercises.rehearse import answers, files, wrong_answers
from minitorch_dist.testing import ranks

from ..quick import asked

COURSE = Course()
CHAPTERS = {chapter.folder: chapter for chapter in COURSE.chapters}
EXERCISES = {exercise.id: exercise for exercise in COURSE.all_exercises}
ANSWERS = {f"{id} {label}": (exercise, path, text)
           for id, exercise in EXERCISES.items() for label, path, text in files(COURSE, exercise)}
AT_ONCE = 2
# Of each kind of process one solution is started as a learner's answers are; forked children are the same, see
# test_starting.py.
STARTED = {}
for name, (exercise, _, text) in ANSWERS.items():
    if text == "passed":
        STARTED.setdefault((exercise.kind, *exercise.allow), name)
SLOW = {"13.2 wrong/softmax_program_per_column"}       # 9,000 programs in the interpreter: 10 to 20 s
TOO_SLOW = "no answer within"      # what is said of a wrong answer that is to reach its limit

each_chapter = pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
each_exercise = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)


def judged(name, forked):
    """The Verdict on an answer. Each has a seed of its own, always the same; it's `rehearse --seeds` that looks for
    seeds with which a check errs."""
    exercise, path, text = ANSWERS[name]
    return check_answer(COURSE, exercise, path, ours(COURSE, exercise), seed=zlib.crc32(name.encode()),
                        limit=exercise.limit / (3 if text == TOO_SLOW else 1), start=forked or ranks.launch)


@pytest.fixture(scope="module")
def verdicts(request):
    """{name: future of the Verdict}, two at a time, of those answers whose tests will run; forked but for STARTED."""
    wanted = {name for name, in asked(request, "name")}
    with Starters() as starters, ThreadPoolExecutor(AT_ONCE) as pool:
        found = {name: pool.submit(judged, name, None if name in STARTED.values() else starters.launch)
                 for name in ANSWERS if name in wanted}
        yield found
        for future in found.values():
            future.cancel()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in SLOW))
                                  for name in ANSWERS])
def test_an_answer_is_told_what_it_is(name, verdicts, tmp_path):
    exercise, path, text = ANSWERS[name]
    verdict = verdicts[name].result()
    if verdict.kind == "not installed":
        pytest.skip(verdict.message)
    again = f"\n(repeat with seed {verdict.seed})"
    if text == "passed":
        assert verdict.passed, verdict.text() + again
        picture = draw(COURSE, exercise, verdict, tmp_path / "picture.png")
        assert picture is None or picture[0].stat().st_size > 2000 and picture[1]
    else:
        assert not verdict.passed, f"{name} passes" + again
        assert text in verdict.text(), f"expected: {text}\nsaid: {verdict.text()}{again}"
    if text == "begin with":
        assert verdict.kind == "not begun"


def right_before(exercise):
    """[{id: path}]: right answers unlike ours of what an exercise uses, each of them once."""
    found = {id: [path for path, _ in answers(COURSE, EXERCISES[id], "right")] for id in exercise.uses}
    return [{id: path for id, path in zip(found, paths, strict=True) if path}
            for paths in itertools.zip_longest(*found.values())]


BUILT = {f"{id} {'+'.join(path.stem for path in before.values())}": (exercise, before)
         for id, exercise in EXERCISES.items() for before in right_before(exercise)}


@pytest.mark.parametrize("name", BUILT)
def test_what_comes_later_can_be_built_upon_any_right_answer(name):
    exercise, before = BUILT[name]
    uses = ours(COURSE, exercise) | {id: (path, EXERCISES[id].object) for id, path in before.items()}
    verdict = check_answer(COURSE, exercise, COURSE.solutions / exercise.folder / exercise.file, uses,
                           seed=zlib.crc32(name.encode()))
    assert verdict.passed or verdict.kind == "not installed", f"{verdict.text()}\n(repeat with seed {verdict.seed})"


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith("00.2 wrong")])
def test_a_wrong_diagnosis_is_not_told_the_right_one(name, verdicts):
    exercise, path, _ = ANSWERS[name]
    if path.stem != "diagnose_misspelled":      # which is shown the whole list
        said = verdicts[name].result().text()
        assert "expected" not in said and '“stale gradients”' not in said


def seconds(verdict):
    """That the slowest rank took for all cases of a launch."""
    assert verdict.passed, verdict.text()
    taken = [[got if isinstance(got, list) else [got] for _, got in found] for found in verdict.runs.values()]
    return max(sum(rank.seconds for rank in of_rank) for cases in taken for of_rank in zip(*cases, strict=True))


def test_solutions_take_a_tenth_of_their_limit(verdicts):
    """One that takes longer takes longer again: what else the machine did for a moment doesn't count."""
    for name, (exercise, _, text) in ANSWERS.items():
        if text == "passed" and name in verdicts and verdicts[name].result().kind != "not installed":
            allowed = exercise.limit / (10 if exercise.limit > 3 else 3)      # nothing is cut below three seconds
            tries = (verdicts[name].result() if number == 0 else judged(name, None) for number in range(3))
            assert any(seconds(verdict) <= allowed * launch.patience() for verdict in tries), name


@each_exercise
def test_five_known_mistakes(exercise):
    wrong = wrong_answers(COURSE, exercise)
    assert len(wrong) >= 5, f"{exercise.id} has {len(wrong)} wrong answers"
    texts = collections.Counter(text for _, text in wrong)
    assert all(len(text) >= 12 for text in texts), "a diagnosis is a sentence"
    assert len(texts) >= 4, "the mistakes are told apart"


@each_chapter
def test_a_chapter_is_whole(chapter):
    folder, solutions = COURSE.exercises / chapter.folder, COURSE.solutions / chapter.folder
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert 20 <= len(readme.splitlines()) <= 120, "one to three screens"
    assert not [e.id for e in chapter.exercises if e.id not in readme], "README says nothing of them"
    for path in re.findall(r"`((?:minitorch_dist|mnist_demo|examples)/[\w/]+\.py)`", readme):
        assert (COURSE.exercises.parent / path).is_file(), f"README names {path}"
    assert 5 <= chapter.minutes <= 240 and chapter.title
    assert [e.file for e in chapter.exercises] == list(dict.fromkeys(e.file for e in chapter.exercises))
    if chapter.exercises:
        assert set(checks_of(folder)) == {e.id for e in chapter.exercises}
        hints = (folder / "hints.md").read_text(encoding="utf-8")
        for exercise in chapter.exercises:
            section = re.search(rf"^## {re.escape(exercise.id)}$(.*?)(?=^## |\Z)", hints, re.M | re.S)
            assert section and len(re.findall(r"^\d+\. ", section[1], re.M)) >= 2, f"hints for {exercise.id}"
            assert set(exercise.uses) <= set(EXERCISES)
    known = {path for exercise in chapter.exercises for path, _ in wrong_answers(COURSE, exercise)}
    assert set(solutions.glob("wrong/*.py")) <= known, "a wrong answer whose first line names no exercise"


def test_needs_have_no_cycle_and_exist():
    needs = {chapter.number: chapter.needs for chapter in COURSE.chapters}
    assert len(needs) == len(COURSE.chapters), "two chapters with one number"
    done = set()
    while todo := [n for n in needs if n not in done and all(m in done or m not in needs for m in needs[n])]:
        done |= set(todo)
    assert done == set(needs), f"a cycle among {set(needs) - done}"


def test_uses_point_backwards():
    order = list(EXERCISES)
    for id, exercise in EXERCISES.items():
        assert all(order.index(other) < order.index(id) for other in exercise.uses), id


@each_chapter
def test_skeletons_are_those_of_the_solutions(chapter):
    for file, text in build.skeletons(COURSE, chapter).items():
        path = COURSE.exercises / chapter.folder / file
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m exercises.build {chapter.number}"
        ast.parse(text)
    python = {path.name for path in (COURSE.exercises / chapter.folder).glob("*.py")}
    ours = {path.name for path in (COURSE.solutions / chapter.folder).glob("*.py")}
    assert python & ours == {e.file for e in chapter.exercises}, "a skeleton or a solution of no exercise"


@each_chapter
def test_no_answer_leaks(chapter):
    folder = COURSE.exercises / chapter.folder
    solutions = {e.file: (COURSE.solutions / chapter.folder / e.file).read_text(encoding="utf-8")
                 for e in chapter.exercises}
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())
             if path.name in (*solutions, "hints.md", "README.md", "drive.py")}
    assert not build.leaks(solutions, texts)
    for file, source in solutions.items():
        assert build.written_by_learner(source), f"{file}: no mark `# begin with`"


def test_the_clips_edges_are_told(tmp_path):
    ratios = np.linspace(0.4, 1.8, 141)
    got = {"good": -np.minimum(ratios, 1.28), "bad": np.maximum(ratios, 0.8), "k3": 1 / ratios - 1 + np.log(ratios)}
    check = checks_of(COURSE.exercises / "24_post_training")["24.3"]
    said = check.picture({1: [({"ratios": ratios}, got)]}, tmp_path / "picture.png")
    assert "above ρ = 1.28 " in said and "below 0.80 " in said, said
