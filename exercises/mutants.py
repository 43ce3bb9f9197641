"""Grades the grader: `python -m exercises.mutants [CHAPTER | EXERCISE …]`.

Changes the learner's part of every solution in all the small ways that are listed below, one at a time, and checks
each mutant. One that passes is a hole in the check, or no mistake: then solutions/NN_name/equivalent.toml names it and
says why. Status 1 if fewer than 95 % of the others are rejected, or if a mutant named there is gone, or rejected after
all.
"""

import argparse
import ast
import copy
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import build
from .frame.answers import ours
from .frame.checking import check_answer
from .frame.course import Course, CourseError

AT_ONCE = 2
LIMIT = 2.0           # seconds, or ten times what the solution takes
ENOUGH = 0.95

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
             ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitXor: ast.BitOr,
             ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}


# ---------------------------------------------------------------- the small ways; each yields nodes instead of a node

def operator(node):
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        yield changed(node, op=OPERATORS[type(node.op)]())
    if isinstance(node, ast.AugAssign):
        yield ast.Assign([node.target], node.value)
    if isinstance(node, ast.BoolOp):
        yield changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield node.operand


def comparison(node):
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield changed(node, ops=[*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1:]])


def constant(node):
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)


def condition(node):
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield changed(node, test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            yield changed(node, ifs=[*node.ifs[:i], ast.UnaryOp(ast.Not(), test), *node.ifs[i + 1:]])


def arguments(node):
    if isinstance(node, ast.Call):
        if len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            yield changed(node, args=[node.args[1], node.args[0], *node.args[2:]])
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict"):
                yield changed(node, keywords=node.keywords[:i] + node.keywords[i + 1:])
    if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load):
        yield changed(node, elts=node.elts[::-1])


def slice_end(node):
    if isinstance(node, ast.Slice):
        for end in ("lower", "upper"):
            value = getattr(node, end)
            if value is not None and not isinstance(value, ast.Constant):
                yield changed(node, **{end: ast.BinOp(value, ast.Add(), ast.Constant(1))})


def statement(node):
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.For, ast.If, ast.While, ast.With)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):     # a docstring
            yield ast.Pass()


WAYS = (operator, comparison, constant, condition, arguments, slice_end, statement)


def changed(node, **fields):
    """A copy of the node with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


# ---------------------------------------------------------------- mutants

class Replace(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


def mutants(source):
    """{name: text}: the solution's text with one small change each; the name is "old statement => new statement"."""
    tree = ast.parse(source)
    mine = {line for first, last, _ in build.edits(source) for line in range(first + 1, last + 1)}
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno in mine
                  and not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    unchanged, found = ast.unparse(tree), {}
    for stmt in statements:
        for node in own_nodes(stmt):
            for new in (new for way in WAYS for new in way(node)):
                text = ast.unparse(ast.fix_missing_locations(replaced(source, node, new)))
                if text != unchanged:
                    found.setdefault(f"{head(stmt)} => {head(replaced_in(stmt, node, new))}", text)
    return found


def own_nodes(stmt):
    """The nodes of a statement that are in no statement inside it. `strict=` guards against mistakes, and is none."""
    stack = [stmt]
    while stack:
        node = stack.pop()
        yield node
        stack += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)
                  and not (isinstance(child, ast.keyword) and child.arg == "strict")]


def replaced(source, node, new):
    """The tree of the source, with `new` where `node` stands."""
    tree, wanted = ast.parse(source), ast.dump(node, include_attributes=True)
    same = next(other for other in ast.walk(tree) if ast.dump(other, include_attributes=True) == wanted)
    return Replace(same, new).visit(tree)


def replaced_in(stmt, node, new):
    """A copy of the statement, with `new` where `node` stands."""
    return new if stmt is node else Replace(node, new).visit(copy.deepcopy(stmt, {id(node): node}))


def head(stmt):
    """The first line of a statement."""
    return ast.unparse(ast.fix_missing_locations(stmt)).split("\n")[0]


# ---------------------------------------------------------------- the command

def known_equivalents(course, exercise):
    """{name: why} of the mutants that are no mistakes."""
    path = course.solutions / exercise.folder / "equivalent.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")).get(exercise.id, {}) if path.is_file() else {}


def try_mutants(course, exercise, folder):
    """{name: Verdict} of all mutants of an exercise."""
    solution = course.solutions / exercise.folder / exercise.file
    uses = ours(course, exercise)
    texts = mutants(solution.read_text(encoding="utf-8"))
    limit = max(LIMIT, exercise.limit / 3)

    def check(item):
        number, text = item
        path = folder / str(number) / exercise.file
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        return check_answer(course, exercise, path, uses, limit=limit)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(texts, pool.map(check, enumerate(texts.values())), strict=True))


def parser():
    found = argparse.ArgumentParser(prog="python -m exercises.mutants", description="For authors: how many small "
                                    "changes of each solution its check rejects, and which it doesn't. Minutes.")
    found.add_argument("name", nargs="*", metavar="EXERCISE", help="8, 08, 08.1 or the name of the function; all if "
                                                                   "none is named")
    return found


def main(argv=None):
    """Print a line per exercise, and the survivors."""
    names = parser().parse_args(argv).name
    course, failed = Course(), False
    try:
        exercises = [e for name in names for e in course.find(name)] or course.all_exercises
    except CourseError as error:
        print(error)
        return 2
    for exercise in exercises:
        with tempfile.TemporaryDirectory() as folder:
            verdicts = try_mutants(course, exercise, Path(folder))
        known = known_equivalents(course, exercise)
        survivors = [name for name, verdict in verdicts.items() if verdict.passed]
        open_ones = [name for name in survivors if name not in known]
        stale = [name for name in known if name not in survivors]
        total = len(verdicts) - len([name for name in known if name in verdicts])
        share = 1 - len(open_ones) / max(total, 1)
        print(f"{exercise.id} {exercise.object:24} {total - len(open_ones):4} of {total:4} rejected ({share:6.1%}), "
              f"{len(known) - len(stale)} more explained", flush=True)
        for name in open_ones:
            print(f"    survived: {name}", flush=True)
        for name in stale:
            print(f"    in equivalent.toml, but gone or rejected: {name}", flush=True)
        failed |= share < ENOUGH or bool(stale)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
