"""Programs that are for one process, started as several: they say so, and do nothing."""

import os
import runpy
import sys
from pathlib import Path

import pytest

from exercises import cli
from minitorch_dist import __main__ as tools
from minitorch_dist import launch_env
from minitorch_dist.testing import ranks

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
         for folder in ("examples", "mnist_demo") for path in sorted((ROOT / folder).glob("*.py"))}
ALONE = [path for path, text in TEXTS.items() if f"python {path}" in text and "comm.world()" not in text]


@pytest.fixture(params=[0, 1])
def as_rank(request, monkeypatch):
    """As if this process were one of two ranks."""
    for name in launch_env.SIZE_VARIABLES + launch_env.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", str(request.param))
    monkeypatch.setenv(launch_env.RANK_PROCESS, str(os.getpid()))
    return request.param


def refused(as_rank, name, capsys, call):
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == ("" if as_rank else f"{name}: is for one process, and here are 2: start it "
                                           "without mpirun\n")


@pytest.mark.parametrize("path", ALONE)
def test_examples(as_rank, path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    refused(as_rank, Path(path).name, capsys, lambda: runpy.run_path(str(ROOT / path), run_name="__main__"))


@pytest.mark.parametrize("line", [["map"], ["hint", "08.1"]], ids=" ".join)
def test_the_course(as_rank, line, capsys):
    refused(as_rank, "exercises", capsys, lambda: cli.main(line))


@pytest.mark.parametrize("line", [["pipeline", "1f1b"], ["kernels"]], ids=" ".join)
def test_tools(as_rank, line, capsys):
    refused(as_rank, f"minitorch-dist {line[0]}", capsys, lambda: tools.main(line))


def test_started_by_mpirun():
    run = ranks.launch([ROOT / "examples" / "recall.py"], 2, limit=60)
    assert run.returncode == 2 and "".join(run.stdout) == ""
    assert "".join(run.stderr) == "recall.py: is for one process, and here are 2: start it without mpirun\n"
