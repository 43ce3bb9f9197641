"""What the README, docs/parallelism.md and docs/guide.md show runs, as written."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from minitorch_dist import __main__ as tools
from minitorch_dist.testing import ranks

ROOT = Path(__file__).parents[1]
PROGRAM = (ROOT / "README.md", ROOT / "docs/parallelism.md")     # the second goes on from the first
FOLDERS = ("mnist_demo", "examples", "benchmarks", "minitorch_dist", "exercises", "tests", "docs")
PAGES = sorted(ROOT.glob("*.md")) + [page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))]
BLOCKS = [block for page in PROGRAM
          for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)]

GUIDE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide.md").read_text(encoding="utf-8"), re.DOTALL)
IMPORTS = "import numpy as np, minitorch_dist as mt\nfrom minitorch_dist import comm, data, nn, optim, training\n"
# What the guide's blocks take for granted, by a word of theirs. (The emulator's has tests/kernels/.)
GRANTED = {
    "encoder = ": "source = np.array([[1, 2, 3, 0], [4, 5, 0, 0]]); x = mt.zeros(2, 4, 64); y = mt.zeros(2, 6, 64)",
    "lora.add": "",
    "targets=targets": "gpt = nn.GPT(65, 8, 1, 2, 16); tokens = targets = np.ones((2, 8), int)",
    "packing.pack": "",
    "class SignMomentum": "",
    "data.TokenWriter": "",
    "nn.Rotary": "vocabulary = 5",
    "roll_out": """
from minitorch_dist.parallel import DistributedDataParallel
world, step, reward = comm.world(), 0, lambda tokens, labels: (tokens[:, 2] == labels).astype(float)
model, reference = (DistributedDataParallel(nn.GPT(5, 8, 1, 2, 16), world) for _ in range(2))
optimizer = optim.AdamW(model.parameters(), 1e-3)
batch = next(iter(data.Loader(np.ones((4, 2), int), np.ones(4, int), batch_size=4).epoch(0)))
"""}


@pytest.mark.parametrize("word", GRANTED)
def test_the_guides_python_runs(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    block, = (block for block in GUIDE if word in block)
    exec(f"{IMPORTS}{GRANTED[word]}\n{block.replace('…', 'layers=1, heads=2, dim=8')}", {})


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_rows_of_tables_have_as_many_cells_as_their_heads(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):       # a | within a cell is written \|
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


PROGRAMS = [path for folder in ("examples", "mnist_demo") for path in sorted((ROOT / folder).glob("*.py"))]


def shown(command):
    """The options that a command has in the pages and in the programs' docstrings, each text of them once."""
    texts = [path.read_text(encoding="utf-8").replace("\\\n", " ") for path in PAGES + PROGRAMS]
    pattern = re.compile(f"python {re.escape(command)}" + r"((?: +[^\s`#|;…]+)*)")
    return sorted({options.strip() for text in texts for options in pattern.findall(text)})


@pytest.mark.parametrize("path", [path for path in PROGRAMS if "\ndef parse(argv)" in path.read_text(encoding="utf-8")],
                         ids=lambda path: path.stem)
def test_a_program_takes_the_options_that_it_is_shown_with(path):
    parse, found = runpy.run_path(path)["parse"], shown(path.relative_to(ROOT).as_posix())
    assert found
    for options in found:
        parse(shlex.split(options))


@pytest.mark.parametrize("command", ["plan", "pipeline"])
def test_what_is_worked_out_on_paper_can_be(command, capsys):
    found = [options for options in shown(f"-m minitorch_dist {command}") if options]
    assert len(found) >= 4
    for options in found:
        assert tools.main([command, *shlex.split(options)]) == 0 and capsys.readouterr().out
