"""The floors of ARCHITECTURE.md against the code: all files stand there, and nothing imports upward."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minitorch_dist"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
FLOORS = re.search(r"^minitorch_dist/\n(.*?)^```", PAGE, re.M | re.S)[1]
BY_CALL = {     # what is looked up when it is called, and stands above: importer -> floor
    ("autodiff/primitive.py", "reverse"), ("autodiff/tensor.py", "reverse"), ("autodiff/tensor.py", "ops"),
    ("parallel/tensor/tensor_parallel.py", "experts")}


def listed(folder=""):
    """The names in a folder of the list, lowest first: backend, kernels …"""
    if not folder:
        return re.findall(r"^  (\w+)(?:\.py|/)", FLOORS, re.M)
    inside = re.search(rf"^  {folder}/.*\n((?: {{4}}.*\n)*)", FLOORS, re.M)[1]
    return re.findall(r"^ {4}(\w+)(?:\.py|/)", inside, re.M)


def modules(folder):
    """Names of the modules and packages that the folder holds."""
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}


@cache
def imports(path):
    """[(module imported as parts below minitorch_dist, line, whether only when a function is called)]"""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("minitorch_dist", *path.relative_to(PACKAGE).parts[:-1])
    late = {id(inner) for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[:len(package) - node.level + 1]] if node.level else []
            names = [base + (node.module or "").split(".") * bool(node.module) + [alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "minitorch_dist":
                found.append((tuple(name[1:]), node.lineno, id(node) in late))
    return found


def upward(folder, floors, depth):
    """(file:line, floor above) of every import that goes up; those at calls that are in BY_CALL left out."""
    for path in sorted(folder.rglob("*.py")):
        mine, name = path.relative_to(folder).parts[0].removesuffix(".py"), path.relative_to(PACKAGE).as_posix()
        for parts, line, late in imports(path) if mine != "__init__" else ():
            if parts[:depth] != folder.relative_to(PACKAGE).parts or len(parts) == depth or parts[depth] not in floors:
                continue
            if floors.index(parts[depth]) > floors.index(mine) and not (late and (name, parts[depth]) in BY_CALL):
                yield f"{name}:{line}", parts[depth]


FOLDERS = ("", "autodiff", "compiler", "parallel")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_stands_on_a_floor(folder):
    floors = listed(folder)
    assert len(floors) == len(set(floors)) > 10 and set(floors) == modules(PACKAGE / folder) - {"__init__"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_imports_upward(folder):
    assert not list(upward(PACKAGE / folder, listed(folder), 1 if folder else 0))


def test_an_import_upward_is_seen():
    found = list(upward(PACKAGE, listed()[::-1], 0))
    assert ("autodiff/__init__.py", "backend") not in found and len(found) > 100


def test_the_files_that_it_names_exist():
    paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|md))?)`", PAGE))
    assert len(paths) > 10 and not [path for path in paths if not ((ROOT / path).exists() or (PACKAGE / path).exists())]
    files = set(re.findall(r"\b\w+\.py\b", FLOORS))
    assert len(files) > 30 and not files - {path.name for path in PACKAGE.rglob("*.py")}


COUNT = """
from minitorch_dist.autodiff import LINEAR, OPS
from minitorch_dist.parallel import collectives     # enters its own, if nobody has loaded it yet
own = {name for name, op in OPS.items() if getattr(op.forward, "__module__", "") == collectives.__name__}
linear = {name for name, op in LINEAR.items() if getattr(op.apply, "__module__", "") == collectives.__name__}
assert own and linear
print(len(OPS) - len(own), len(LINEAR) - len(linear))
"""     # in a process of its own: tests enter some, too


def test_the_op_table_has_the_size_that_it_says():
    found = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.search(r"(\d+) primitives over (\d+) LinearOps", FLOORS).groups() == tuple(found.split())


LATE = """
import sys
from importlib import import_module
import minitorch_dist.parallel.pipelines.schedules      # needs no ranks, and nothing but the table of steps
loaded = [name for name in sys.modules if name.startswith("minitorch_dist.parallel.")]
assert "minitorch_dist.parallel.pipelines.pipeline" not in loaded, loaded
for package in sys.argv[1:]:
    module = import_module("minitorch_dist.parallel." + package)
    for name in module.__all__:
        assert getattr(module, name) is not None and (name.isupper() or getattr(module, name).__name__ == name), name
"""


def test_packages_of_parallel_import_their_names_when_somebody_asks():
    packages = [path.parent.name for path in (PACKAGE / "parallel").glob("*/__init__.py")
                if "of_modules" in path.read_text(encoding="utf-8")]
    assert len(packages) > 5
    found = subprocess.run([sys.executable, "-c", LATE, *packages], capture_output=True, text=True, timeout=60)
    assert not found.returncode, found.stderr


def test_the_evening_is_as_long_as_it_says():
    section = PAGE.split("## If you have an evening")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", section, re.M)
    files, total = re.search(r"in (\d+) files of ([\d,]+) lines", section).groups()
    assert int(files) == len(rows) > 10 and int(total.replace(",", "")) == sum(int(lines) for _, lines in rows)
    for name, lines in rows:        # within a tenth: no mend of a line has to be told
        found = len((PACKAGE / name).read_text(encoding="utf-8").splitlines())
        assert abs(found - int(lines)) <= int(lines) / 10, f"{name} has {found} lines"
