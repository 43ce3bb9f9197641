"""For authors: `python -m exercises.rehearse 08 | 08.3 …` shows what each file of an exercise is told."""

import sys

from .frame.answers import ours
from .frame.checking import check_answer, draw
from .frame.course import Course


def wrong_answers(course, exercise):
    """[(path, text that the verdict must contain)]."""
    found = []
    for path in sorted((course.solutions / exercise.folder / "wrong").glob("*.py")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        id, _, text = first.removeprefix("# ").partition(": ")
        if id == exercise.id:
            found.append((path, text))
    return found


def files(course, exercise):
    """[(label, path, text that the verdict must contain)]: the solution, the skeleton and the wrong answers."""
    return [("solution", course.solutions / exercise.folder / exercise.file, "passed"),
            ("skeleton", course.exercises / exercise.folder / exercise.file, "begin with"),
            *((f"wrong/{path.stem}", path, text) for path, text in wrong_answers(course, exercise))]


def main(names):
    """Status 1 if a verdict isn't as it should be."""
    course, failed = Course(), 0
    for name in names or ["."]:
        for exercise in course.all_exercises if name == "." else course.find(name):
            for label, path, text in files(course, exercise):
                verdict = check_answer(course, exercise, path, ours(course, exercise))
                as_told = text in verdict.text() and verdict.passed == (text == "passed")
                failed += not as_told
                print(f"{'    ' if as_told else '>>> '}{exercise.id} {label} "
                      f"[{verdict.seconds:.1f} s] {verdict.text()}" + ("" if as_told else f"\n>>> expected: {text}"))
                if verdict.passed and (picture := draw(course, exercise, verdict, course.mine / "rehearse.png")):
                    print(f"    picture: {picture[0]}: {picture[1]}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
