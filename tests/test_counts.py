"""What pages count is counted: a number that has drifted fails here."""

import re
from pathlib import Path

import pytest

from exercises.frame.course import Course
from minitorch_dist import data
from minitorch_dist.comm.algorithms import ALGORITHMS
from tests.exercises.test_cheats import CHEATS

ROOT = Path(__file__).parents[1]
COURSE = Course()
WORDS = {"four": 4, "five": 5, "six": 6}


def text(page):
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def answers(kind):
    return len(list((ROOT / "solutions").glob(f"*/{kind}/*.py")))


def lines(path):
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def slots():
    return len({exercise.slot for exercise in COURSE.all_exercises if exercise.slot})


def faults():
    return len(re.findall(r"^## ", (ROOT / "docs/faults.md").read_text(encoding="utf-8"), re.M))


def diagnoses():
    found = re.search(r"^MISTAKES = \((.*?)^\)", (ROOT / "exercises/00_demo/diagnose.py").read_text(), re.M | re.S)
    return len(re.findall(r'^    "', found[1], re.M))


def generations():
    found = re.search(r"^CAPABILITIES = \((.*?)\)", (ROOT / "tests/kernels/test_compiled.py").read_text(), re.M)
    return len(found[1].split(","))


COUNTED = [     # (page, what it says, what there is); of "some N", N is right within 5 %
    ("README.md", r"(\S+) chapters; what each needs", lambda: len(COURSE.chapters)),
    ("README.md", r"(\S+) wrong answers that people", lambda: answers("wrong")),
    ("README.md", r"(\S+) right ones unlike ours", lambda: answers("right")),
    ("README.md", r"shows (\S+) faults and what you see", faults),
    ("README.md", r"trains on (\S+) real handwritten digits",
     lambda: sum(map(len, (data.load("digits").train_labels, data.load("digits").test_labels)))),
    ("docs/teaching.md", r"test_cheats.py` try (\S+) cheats", lambda: len(CHEATS)),
    ("docs/guide.md", r"compiles it for (\S+) generations of GPUs", generations),
    ("exercises/00_demo/README.md", r"lists (\S+) mistakes", diagnoses),
    ("exercises/02_dual_numbers/README.md", r"the same Dual on arrays, in (\S+) lines",
     lambda: lines("minitorch_dist/autodiff/forward.py")),
    ("exercises/15_capstone/README.md", r"and (\S+) parts of it are yours", slots),
    ("exercises/15_capstone/README.md", r"and (\S+) algorithms beside yours", lambda: len(ALGORITHMS)),
]


@pytest.mark.parametrize(("page", "said", "counted"), COUNTED,
                         ids=[f"{page}: {said}".replace(r"(\S+)", "N") for page, said, _ in COUNTED])
def test_a_number_on_a_page_is_that_of_what_there_is(page, said, counted):
    found = re.search(rf"(some )?{said}", text(page))
    number = WORDS.get(found[2]) or int(found[2].replace(",", ""))
    assert counted() == (pytest.approx(number, rel=0.05) if found[1] else number)


def test_checks_are_as_short_as_authors_are_told():
    most = int(re.search(r"check.py has (\d+) lines at most", text("docs/authoring.md"))[1])
    assert max(lines(path) for path in (ROOT / "exercises").glob("*/check.py")) <= most


def numbers(said):
    """Of "chapters 1 to 3 and 7" {1, 2, 3, 7}."""
    return {number for first, last in re.findall(r"(\d+)(?: to (\d+))?", said)
            for number in range(int(first), int(last or first) + 1)}


def test_teachers_are_told_which_chapters_need_several_processes():
    said = (r"Chapters (.*?) \(several processes\) .* chapters (.*?) need no second process, and chapters (.*?) need "
            "neither")
    several, alone, neither = re.search(said, text("docs/teaching.md")).groups()
    with_ranks = {exercise.id for exercise in COURSE.all_exercises if exercise.kind == "ranks"}
    excepted = set(re.findall(r"\d+\.\d", neither))
    free = numbers(alone) | numbers(re.sub(r"\(but for[^)]*\)", "", neither))
    assert excepted == {id for id in with_ranks if int(id[:2]) in free}
    capstone = {15}      # of which the page speaks elsewhere
    assert numbers(several) | capstone == {int(id[:2]) for id in with_ranks - excepted}
    assert free | numbers(several) | capstone == {chapter.number for chapter in COURSE.chapters}


def test_teachers_are_told_all_kinds_of_verdicts():
    code = "".join(path.read_text(encoding="utf-8")
                   for path in (ROOT / "exercises/grade.py", *(ROOT / "exercises/frame").glob("*.py")))
    given = re.findall(r'(?:Failure\(|Verdict\(\w+, |"kind": )"([a-z ]+)"', code)
    said = re.search(r"`kind` is (.*?) Links that lead out", text("docs/teaching.md"))[1]
    assert len(given) > 20 and set(re.findall("`([a-z ]+)`", said)) == set(given)
