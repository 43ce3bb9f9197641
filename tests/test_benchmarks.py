"""The benchmarks' reports, which nobody wants to see fail on a machine that is lent by the minute."""

import importlib
import json
import os
import sys
import tarfile
import time
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
    for name in ("_gpu", "_harness", "again", "in_turn", "kit", "train"):
        sys.modules.pop(name, None)


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
        report = gpu.report_of("train", "Steps", "NVIDIA H200 (CuPy 14)", ["gpt"], parts)
        assert report.title == "Steps (gpt) on NVIDIA H200 (CuPy 14)"
        assert (report.name, report.folder.name) == ("train_gpt_nvidia_h200", folder)
    other = gpu.report_of("train", "Steps", "NVIDIA H100 80GB HBM3 (CuPy 14)", list(parts), parts)
    assert other.name == "train_nvidia_h100_80gb_hbm3"
    assert gpu.report_of("train", "Steps", "Emulated GPU (CuPy 14)").folder.name == "quick"


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


def test_what_torch_compiles_comes_when_the_rest_is_kept(gpu, monkeypatch):
    train, order, tables = importlib.import_module("train"), [], []

    def maker(who):
        order.append(who)
        return lambda: SimpleNamespace(item=lambda: 1.0)
    makers = {who: lambda who=who: maker(who) for who in (train.EAGER, *train.COMPILED, train.OURS)}
    monkeypatch.setattr(train, "makers", lambda torch, name: makers)
    monkeypatch.setattr(train, "kernels_of", lambda steps: "")
    monkeypatch.setattr(train, "ROUNDS", 1)
    monkeypatch.setattr(train, "TURN", 0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None)))
    report = SimpleNamespace(table=lambda caption, rows: tables.append(rows), aim=lambda *about: None,
                             save=lambda: order.append([row["step of"] for row in tables[0] if "ms" in row]))
    train.measure(cupy, "torch", report, "mlp")
    assert order == [train.EAGER, train.OURS, [train.EAGER, train.OURS], *train.COMPILED]
    assert [row["step of"] for row in tables[0] if "ms" in row] == [train.EAGER, train.OURS, *train.COMPILED]


@pytest.mark.parametrize("name", [path.name for path in sorted((FOLDER / "gpu").glob("[!_]*.py"))])
def test_what_is_misspelt_is_told_before_anything_is_measured(gpu, name):
    found = run(FOLDER / "gpu" / name, "--quikc")
    assert "unknown: --quikc" in str(found.status)


# ---------------------------------------------------------------- a machine that is lent by the minute

@pytest.fixture
def in_turn(gpu, tmp_path, monkeypatch):
    """benchmarks/gpu/in_turn.py, in a project of its own."""
    module = importlib.import_module("in_turn")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def brought(folder, name):
    """A file of what is brought back, as text."""
    with tarfile.open(folder / "brought.tar.gz") as tar:
        return tar.extractfile(name).read().decode()


def test_a_part_that_fails_or_takes_too_long_takes_nothing_with_it(in_turn, tmp_path, capsys):
    """Nor leaves anything: what it has started in the background ends with it."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    parts = [in_turn.Part("first", 1, 60, "echo {python}; echo {{}} > benchmarks/results/gpu_first.json", "one"),
             in_turn.Part("bad", 1, 60, "echo why; exit 3", "another"),
             in_turn.Part("slow", 1, 1, "sleep 600 & echo $!; wait", "a third"),
             in_turn.Part("long", 3600, 9000, "echo never > benchmarks/results/gpu_long.json", "one that won't end"),
             in_turn.Part("last", 1, 60, "echo here", "the last")]
    rows = in_turn.in_turn(parts, 30, tmp_path / "out", tmp_path / "kit")
    assert [(name, how.split(":")[0]) for name, how, _ in rows] == [
        ("first", "done"), ("bad", "status 3"), ("slow", "ended after 1 s"), ("long", "left out"), ("last", "done")]
    assert brought(tmp_path / "out", "runs/logs/first.log").strip() == sys.executable
    assert brought(tmp_path / "out", "benchmarks/results/gpu_first.json").strip() == "{}"
    assert brought(tmp_path / "out", "runs/logs/bad.log").strip() == "why" and "why" in capsys.readouterr().out
    left = int(brought(tmp_path / "out", "runs/logs/slow.log"))
    limit = time.monotonic() + 20
    while is_running(left) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not is_running(left)


def is_running(pid):
    """Not a process that has ended and waits to be asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("deaf", [False, True])
def test_a_part_whose_time_is_over_may_say_what_it_knows(in_turn, tmp_path, monkeypatch, deaf):
    """As pytest does when it is interrupted; one that doesn't listen is ended all the same."""
    monkeypatch.setattr(in_turn, "GRACE", 1 if deaf else 30)
    trap = "" if deaf else "echo 3 failed; exit"
    part = in_turn.Part("part", 1, 2, f"trap '{trap}' INT; echo begun; sleep 600 & wait", "something")
    begin = time.monotonic()
    (_, how, _), = in_turn.in_turn([part], 30, tmp_path / "out", tmp_path / "kit")
    assert how == "ended after 2 s" and time.monotonic() - begin < 30
    assert brought(tmp_path / "out", "runs/logs/part.log").split("\n")[1] == ("" if deaf else "3 failed")


def test_the_gpu_s_clocks_are_written_down_meanwhile(in_turn, tmp_path, monkeypatch):
    program = "import time; print(1980, flush=True); time.sleep(600)"
    monkeypatch.setattr(in_turn, "CLOCKS", [sys.executable, "-c", program])
    part = in_turn.Part("part", 1, 60, "until [ -s runs/logs/clocks.csv ]; do sleep 0.1; done", "something")
    (_, how, _), = in_turn.in_turn([part], 30, tmp_path / "runs" / "out", tmp_path / "kit")
    assert how == "done" and brought(tmp_path / "runs" / "out", "runs/logs/clocks.csv") == "1980\n"
    assert [path.name for path in (tmp_path / "runs" / "out").iterdir()] == ["brought.tar.gz"]
    with tarfile.open(tmp_path / "runs" / "out" / "brought.tar.gz") as tar:
        assert not any("brought" in name for name in tar.getnames())


def test_time_that_is_over_is_no_time(in_turn, tmp_path):
    part = in_turn.Part("part", 5, 60, "echo here", "something")
    (name, how, _), = in_turn.in_turn([part], 0.05, tmp_path / "out", tmp_path / "kit")
    assert name == "part" and how == "left out: 3 s were left of 5"


def test_what_was_left_out_is_the_next_command(in_turn, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(in_turn, "PARTS", [in_turn.Part(name, likely, 60, "echo here", "something")
                                           for name, likely in (("one", 1), ("two", 40), ("three", 1), ("four", 40))])
    monkeypatch.setattr(in_turn, "KIT", tmp_path / "kit")
    monkeypatch.setattr(sys, "argv", ["in_turn.py", "--minutes", "0.5", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        in_turn.main()
    assert end.value.code == 1 and capsys.readouterr().out.endswith(
        f"/in_turn.py --minutes 0.5 --out {tmp_path / 'out'} two four\n")


def test_parts_find_the_checkout_and_the_kit_s_machine_code(in_turn, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert in_turn.environment(tmp_path)["PYTHONPATH"] == f"{tmp_path}:elsewhere"
    part = in_turn.Part("part", 1, 60, "echo ${{XDG_CACHE_HOME:-none}}", "where the cache is")
    for there in (False, True):
        if there:
            (tmp_path / "kit").mkdir()
        in_turn.in_turn([part], 1, tmp_path / "out", tmp_path / "kit")
        assert brought(tmp_path / "out", "runs/logs/part.log").strip().endswith("kit/cache") == there


def test_every_part_is_a_program_that_is_there_and_in_the_readme(in_turn):
    text = (FOLDER / "README.md").read_text()
    for part in in_turn.PARTS:
        assert part.likely < part.limit <= 600
        assert f"| {part.name} | {part.shows} | {part.likely} | {part.limit} |" in text
        for word in part.command.replace("&&", " ").split():
            if word.endswith(".py"):
                assert (FOLDER.parent / word).is_file(), part


def test_failed_tests_are_run_again_one_by_one(gpu, tmp_path, monkeypatch, capsys):
    """The first under compute-sanitizer, too; every launch is waited for."""
    again = importlib.import_module("again")
    (tmp_path / "test_some.py").write_text("import os\ndef test_one():\n"
                                           "    assert 'first' == os.environ['CUDA_LAUNCH_BLOCKING']\n"
                                           "def test_other():\n    assert 'second' == 2\n")
    (tmp_path / "compute-sanitizer").write_text('#!/bin/sh\necho looked at "$4"\nexit 7\n')
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(again, "ROOT", tmp_path)
    monkeypatch.setattr(again, "SANITIZED", 1)
    monkeypatch.setattr(sys, "argv", ["again.py"])
    again.main()
    assert capsys.readouterr().out == "0 tests have failed\n"
    names = ["test_some.py::test_one", "test_some.py::test_other"]
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(names, True)))
    again.main()
    said = capsys.readouterr().out
    assert said.startswith("2 tests have failed\n") and said.count("--- status 1\n") == 2
    assert "assert 'first' == '1'" in said and "assert 'second' == 2" in said
    assert said.endswith("--- status 7\n") and said.count("looked at") == 1
    assert again.spread(list("abcdefgh"), 3) == ["a", "c", "f"] and again.spread(["a"], 3) == ["a"]


def test_a_kit_keeps_machine_code_alone(gpu, tmp_path):
    kit, build = importlib.import_module("kit"), importlib.import_module("minitorch_dist.kernels.build")
    folder = tmp_path / "minitorch_dist" / "kernels"
    for name, cubin in (("code", b"\x7fELF..."), ("ptx", b".version 8.7")):
        build.write(folder / f"{name}.json", build.Binary("kernel", ("*fp32",), 2, 0, 4, cubin))
    (folder / "torn.json").write_text("{")
    assert [path.name for path in kit.machine_code(tmp_path)] == ["code.json"]
    assert [path.name for path in folder.iterdir()] == ["code.json"]
