"""What the README and docs/parallelism.md show runs, as written."""

import re
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks

ROOT = Path(__file__).parents[1]
PROGRAM = (ROOT / "README.md", ROOT / "docs/parallelism.md")     # the second goes on from the first
FOLDERS = ("mnist_demo", "examples", "benchmarks", "minitorch_dist", "exercises", "tests", "docs")
PAGES = sorted(ROOT.glob("*.md")) + [page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))]
BLOCKS = [block for page in PROGRAM
          for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)]


@pytest.mark.parametrize("n", [1, 2])
def test_its_python_runs_on_one_rank_and_on_two(tmp_path, n):
    assert len(BLOCKS) >= 5
    program = tmp_path / "readme.py"
    program.write_text("\n".join(BLOCKS), encoding="utf-8")
    run = ranks.launch([str(program)], n=n, limit=60)
    run.check()
    assert "linear program of 1 input" in run.stdout[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)\)", text)
    assert not [name for name in links if not (page.parent / name).exists()]
    named = set(re.findall(rf"(?<![\w/.~])(?:{'|'.join(FOLDERS)})/[\w/.-]+\.\w+", text))
    assert not [name for name in named if not (ROOT / name).exists()]
