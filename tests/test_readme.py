"""What the README shows runs, as written."""

import re
from pathlib import Path

import pytest

from minitorch_dist.testing import ranks

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("n", [1, 2])
def test_its_python_runs_on_one_rank_and_on_two(tmp_path, n):
    assert len(BLOCKS) >= 2
    program = tmp_path / "readme.py"
    program.write_text("\n".join(BLOCKS), encoding="utf-8")
    run = ranks.launch([str(program)], n=n, limit=60)
    run.check()
    assert "linear program of 1 input" in run.stdout[0]


def test_the_files_that_it_names_exist():
    text = README.read_text(encoding="utf-8")
    for name in re.findall(r"\]\(([^)#:]+)\)", text) + ["mnist_demo/train.py", "mnist_demo/compare.py", "benchmarks"]:
        assert (README.parent / name).exists(), name
