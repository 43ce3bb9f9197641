"""For authors: `python -m exercises.rehearse 08 | 08.3 …` shows what each file of an exercise is told."""

import argparse
import sys

from .frame import seeds
from .frame.answers import ours
from .frame.checking import check_answer, checks_of, draw
from .frame.course import Course, CourseError

SHOWN = 5      # seeds that are named


def answers(course, exercise, folder):
    """[(path, text behind the exercise's id)] of the answers that lie in solutions/NN_name/FOLDER."""
    found = []
    for path in sorted((course.solutions / exercise.folder / folder).glob("*.py")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        id, _, text = first.removeprefix("# ").partition(": ")
        if id == exercise.id:
            found.append((path, text))
    return found


def wrong_answers(course, exercise):
    """[(path, text that the verdict must contain)]."""
    return answers(course, exercise, "wrong")


def files(course, exercise):
    """[(label, path, text that the verdict must contain)]: the solution, the skeleton, other right answers, and the
    wrong ones."""
    return [("solution", course.solutions / exercise.folder / exercise.file, "passed"),
            ("skeleton", course.exercises / exercise.folder / exercise.file, "begin with"),
            *((f"right/{path.stem}", path, "passed") for path, _ in answers(course, exercise, "right")),
            *((f"wrong/{path.stem}", path, text) for path, text in wrong_answers(course, exercise))]


def as_told(verdict, text):
    """Whether a verdict is what the file's first line says."""
    return text in verdict.text() and verdict.passed == (text == "passed")


def rehearse(course, exercise):
    """One check of each file, with a new seed, and the solution's picture; how many verdicts aren't as they should be.
    """
    failed = 0
    for label, path, text in files(course, exercise):
        verdict = check_answer(course, exercise, path, ours(course, exercise))
        right = as_told(verdict, text)
        failed += not right
        print(f"{'    ' if right else '>>> '}{exercise.id} {label} [{verdict.seconds:.1f} s] {verdict.text()}"
              + ("" if right else f"\n>>> expected: {text}\n>>> with seed {verdict.seed}"), flush=True)
        if verdict.passed and (picture := draw(course, exercise, verdict, course.mine / "rehearse.png")):
            print(f"    picture: {picture[0]}: {picture[1]}")
    return failed


def rehearse_seeds(course, exercise, count):
    """Each file, and each mistake that a signature predicts, with the seeds 0 … count - 1; how many go wrong."""
    failed = sum([not with_seeds(course, exercise, *file, range(count)) for file in files(course, exercise)])
    check = checks_of(course.exercises / exercise.folder)[exercise.id]
    for number, n, heard in seeds.clashes(check, exercise.ranks, range(count)):
        failed += 1
        print(f">>> {exercise.id} the mistake of signatures[{number}] on {n} rank{'s' * (n != 1)} isn't told the same "
              f"with every seed: " + "; ".join(f"{who} with {len(found)} seeds like {found[:SHOWN]}"
                                               for who, found in heard.items()), flush=True)
    return failed


def with_seeds(course, exercise, label, path, text, several):
    """Whether a file is told what it should be with all seeds."""
    earlier = ours(course, exercise)
    verdicts = seeds.check_seeds(course, exercise, path, earlier, several)
    doubtful = [seed for seed, verdict in verdicts.items() if not as_told(verdict, text)]
    # An answer that remembers something from seed to seed is another one alone.
    alone = {seed: check_answer(course, exercise, path, earlier, seed) for seed in doubtful[:seeds.AT_ONCE]}
    wrong = {seed: verdict for seed, verdict in alone.items() if not as_told(verdict, text)}
    tried = len(verdicts) - len(doubtful) + len(alone)
    print(f"{'>>> ' if wrong else '    '}{exercise.id} {label}: as it should be with {tried - len(wrong)} of {tried} "
          "seeds", flush=True)
    if wrong:
        seed, verdict = next(iter(wrong.items()))
        print(f">>> expected: {text}\n>>> seeds {list(wrong)[:SHOWN]}; of {seed}: {verdict.text()}", flush=True)
    return not wrong


def parser():
    found = argparse.ArgumentParser(prog="python -m exercises.rehearse", description="For authors: what the solution, "
                                    "the skeleton and every wrong answer are told. Pictures go into mine/rehearse.png, "
                                    "or into the folder that MINITORCH_MINE names. Earlier answers are ours.")
    found.add_argument("name", nargs="*", metavar="EXERCISE", help="8, 08, 08.1 or the name of the function; all if "
                                                                   "none is named")
    found.add_argument("--seeds", type=int, metavar="N", help="with N seeds each; and whether any two known mistakes "
                                                              "look alike with some of them")
    return found


def main(argv=None):
    """Status 1 if a verdict isn't as it should be."""
    args = parser().parse_args(argv)
    course = Course.from_environment()
    try:
        exercises = [e for name in args.name for e in course.find(name)] or course.all_exercises
    except CourseError as error:
        print(error)
        return 2
    failed = [rehearse_seeds(course, exercise, args.seeds) if args.seeds else rehearse(course, exercise)
              for exercise in exercises]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
