"""The benchmarks' reports, which nobody wants to see fail on a machine that is lent by the minute."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .here import run

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """benchmarks/gpu/_gpu.py as a program there finds it."""
    for folder in (FOLDER, FOLDER / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("_gpu")
    for name in ("_gpu", "_harness"):
        del sys.modules[name]


def test_a_row_that_fails_leaves_the_others(gpu, tmp_path, monkeypatch, capsys):
    harness = sys.modules["_harness"]
    monkeypatch.setattr(harness, "HERE", tmp_path)
    report = harness.Report("some", "Some", tmp_path / "benchmarks")
    times = {"small": 2.5, "large": None, "larger": 40.0}
    rows = [gpu.attempt({"size": size}, lambda ms=ms: {"ms": f"{ms:.1f}", "GB/s": "7"}) for size, ms in times.items()]
    assert capsys.readouterr().out.splitlines()[0] == "  size small, ms 2.5, GB/s 7"       # at once
    report.table("by size", rows)
    report.save()
    assert "larger" in capsys.readouterr().out
    written = json.loads((tmp_path / "benchmarks/some.json").read_text())
    lines = harness.markdown(written).splitlines()
    place = lines.index("| size | ms | GB/s | error |")
    assert lines[place + 2:] == ["| small | 2.5 | 7 |  |",
                                 "| large |  |  | TypeError: unsupported format string passed to NoneType.__format__ |",
                                 "| larger | 40.0 | 7 |  |"]


def test_parts_and_rehearsals_are_kept_apart(gpu, monkeypatch):
    parts = ("mlp", "gpt")
    monkeypatch.setattr(sys, "argv", ["train.py", "--quick", "gpt"])
    assert gpu.asked("about", parts) == ["gpt"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--quick"])
    assert gpu.asked("about", parts) == ["mlp", "gpt"]
    for quick, folder in ((False, "results"), (True, "quick")):
        monkeypatch.setattr(gpu, "QUICK", quick)
        report = gpu.report_of("train", "Steps", "a GPU", ["gpt"], parts)
        assert (report.name, report.title, report.folder.name) == ("train_gpt", "Steps (gpt) on a GPU", folder)
    assert gpu.report_of("train", "Steps", "a GPU", list(parts), parts).name == "train"


def test_the_next_rival_finds_the_memory_of_the_last_one(gpu):
    """Also what hangs together in a cycle, as a model and its optimizer may; then the pools give it to the device."""
    order = []

    class Array:
        def __del__(self):
            order.append("gone")
    rival = SimpleNamespace(array=Array())
    rival.itself = rival
    del rival
    pool = SimpleNamespace(free_all_blocks=lambda: order.append("CuPy's pool"))
    torch = SimpleNamespace(cuda=SimpleNamespace(empty_cache=lambda: order.append("torch's")))
    gpu.free(SimpleNamespace(get_default_memory_pool=lambda: pool), torch)
    assert order == ["gone", "CuPy's pool", "torch's"]


@pytest.mark.parametrize("name", [path.name for path in sorted((FOLDER / "gpu").glob("[!_]*.py"))])
def test_what_is_misspelt_is_told_before_anything_is_measured(gpu, name):
    found = run(FOLDER / "gpu" / name, "--quikc")
    assert "unknown: --quikc" in str(found.status)
