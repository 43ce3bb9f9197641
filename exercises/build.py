"""Makes the skeletons in exercises/ out of the solutions: `python -m exercises.build [CHAPTER …]`.

In a solution the comment `# begin with TEXT` (several lines, if the next are comments too), at the level of a
function's own body, says where the learner's part begins: the skeleton keeps what stands before it, and in place of
the rest raises NotImplementedError("begin with TEXT"). A function or class under the comment `# ours` is left out
altogether; everything else is given. Neither mark is in the skeleton.
"""

import argparse
import ast
import re
import sys
import textwrap

from .frame.course import Course

BEGIN = re.compile(r"^(\s*)# begin with (.*)")
OURS = re.compile(r"^\s*# ours\s*$")
TELLING = 16      # a normalised line of fewer characters gives nothing away
NO_SECRET = ("def", "class", "raise", '"""')
LINE_LENGTH = 120


def skeleton(source):
    """The skeleton of a solution's text."""
    lines = source.splitlines()
    for first, last, replacement in sorted(edits(source), reverse=True):
        lines[first:last] = replacement
    text = "\n".join(lines).rstrip() + "\n"
    return re.sub(r"\n{3,}(?= )", "\n\n", re.sub(r"\n{4,}", "\n\n\n", text))


def written_by_learner(source):
    """The lines of the solution that the skeleton must not hold."""
    lines = source.splitlines()
    return [line for first, last, _ in edits(source) for line in lines[first:last]
            if not BEGIN.match(line)]


def edits(source):
    """[(first line, line after the last, what stands there instead)], from 0: what the skeleton changes."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        if first and OURS.match(lines[first - 1]):
            found.append((first - 1, node.end_lineno, []))
        elif isinstance(node, ast.FunctionDef):
            found += _body(node, lines)
    return [e for e in found if not any(f <= e[0] and e[1] <= t and (f, t) != e[:2] for f, t, _ in found)]


def _body(node, lines):
    indent = node.body[0].col_offset
    for at in range(node.lineno, node.end_lineno):
        match = BEGIN.match(lines[at])
        if match and len(match[1]) == indent:
            words, last = [match[2]], at + 1
            while re.match(r"^\s*# ", lines[last]):
                words.append(lines[last].strip()[2:])
                last += 1
            return [(at, node.end_lineno, _raise("begin with " + " ".join(words), indent))]
    return []


def _raise(text, indent):
    start = " " * indent + "raise NotImplementedError("
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    if len(start) + len(quoted) + 3 <= LINE_LENGTH:
        return [f'{start}"{quoted}")']
    parts = textwrap.wrap(quoted, LINE_LENGTH - len(start) - 4, drop_whitespace=False)
    quoted = [f'"{part}"' for part in parts]
    return [start + quoted[0], *(" " * len(start) + part for part in quoted[1:-1]), " " * len(start) + quoted[-1] + ")"]


# ---------------------------------------------------------------- leaks

def normalised(line):
    """A line without comment and blanks."""
    return re.sub(r"\s+", "", line.split("#")[0])


def leaks(solutions, texts):
    """[(name of the text, line)]: telling lines of the learner's part of any solution that stand in a text.

    solutions, texts: {name: text}
    """
    secret = {normalised(line) for source in solutions.values() for line in written_by_learner(source)}
    secret = {line for line in secret if len(line) >= TELLING and not line.startswith(NO_SECRET)}
    return [(name, line) for name, text in texts.items() for line in text.splitlines()
            if not normalised(line).startswith(NO_SECRET) and any(part in normalised(line) for part in secret)]


def skeletons(course, chapter):
    """{file: text} for a chapter, of every file in which an exercise is to be written."""
    folder = course.solutions / chapter.folder
    return {file: skeleton((folder / file).read_text(encoding="utf-8"))
            for file in dict.fromkeys(exercise.file for exercise in chapter.exercises)}


def main(argv=None):
    """Write the skeletons of all chapters, or of those whose numbers are given; what changed is named."""
    course = Course()
    parser = argparse.ArgumentParser(prog="python -m exercises.build", description="For authors: makes the skeletons "
                                     "in exercises/ out of the solutions.")
    parser.add_argument("number", nargs="*", type=int, metavar="CHAPTER", help="8 or 08; all if none is named")
    wanted = parser.parse_args(argv).number
    if unknown := set(wanted) - {chapter.number for chapter in course.chapters}:
        parser.error(f"there is no chapter {', '.join(map(str, sorted(unknown)))}")
    for chapter in course.chapters:
        if wanted and chapter.number not in wanted:
            continue
        for file, text in skeletons(course, chapter).items():
            path = course.exercises / chapter.folder / file
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                print(f"wrote {path.relative_to(course.exercises.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
