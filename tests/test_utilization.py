"""Model FLOPs utilization: the operations of closed forms, the speed that the ranks measure, and both in a run."""

import json
import re
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from examples import gpt
from minitorch_dist import comm, nn, utilization
from mnist_demo import train
from tests.crews import crews


def measured():
    """(FLOPs of a sample, FLOP/s reached) on this rank."""
    found = utilization.measure(comm.world(), nn.mlp((30, 20)), np.zeros((7, 784), np.float32), dtype="float32")
    return found.flops, found.reached


@pytest.mark.parametrize("n", [1, 2])
def test_operations_are_the_models_and_all_ranks_have_one_sum(n):
    found = crews.call("tests.test_utilization:measured", n)
    assert len(set(found)) == 1
    flops, reached = found[0]
    assert flops == 3 * 2 * (784 * 30 + 30 * 20 + 20 * 10) and reached > 1e6


def test_a_gpts_operations_are_those_of_its_products():
    dim, time, layers, vocabulary = 24, 10, 2, 37
    model = nn.GPT(vocabulary, time, layers, 2, dim)
    found = utilization.measure(comm.world(), model, np.zeros((3, time), np.int64), dtype="float32")
    seen = time * time      # scores are made in one piece at this length, those of the future too
    block = 2 * time * dim * (4 * dim + 2 * 4 * dim) + 2 * 2 * seen * dim
    assert found.flops == 3 * (layers * block + 2 * time * dim * vocabulary)


def test_it_is_the_share_of_what_is_reached():
    use = utilization.Utilization(flops=2e6, reached=50e9)
    assert use.mfu(5000) == pytest.approx(0.2)
    assert use.told(5000) == "MFU 20.0 %: 2 MFLOP a sample, 10 GFLOP/s, of 50 that these ranks reach in large products"


@pytest.mark.parametrize("size", [None, 40])
def test_the_speed_is_that_of_the_products_of_all_ranks(monkeypatch, size):
    """On a clock that goes on by a second whenever it is read, of three ranks alike: two products between the first
    time and the last, four seconds later, behind one that warms up and a barrier."""
    events, clock, matmul = [], count(), np.matmul

    def multiply(x, y, **options):
        events.append((x.shape, y.shape, x.dtype))
        return matmul(x, y, **options)
    world = SimpleNamespace(barrier=lambda: events.append("barrier"), all_reduce=lambda rate: rate.__imul__(3))
    monkeypatch.setattr(utilization, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(np, "matmul", multiply)
    found = utilization.reached(world, "float32", size=size, seconds=2.5)
    n = size or 1024
    product = ((n, n), (n, n), np.float32)
    assert events == [product, "barrier", product, product] and found == 3 * 2 * (2 * n ** 3) / 4


@pytest.mark.parametrize(("main", "options"), [
    (train.main, ["--data", "digits", "--steps", "3", "--hidden", "16"]),
    (gpt.main, ["--steps", "3", "--layers", "1", "--dim", "16", "--heads", "2", "--batch-size", "8"])])
def test_a_run_says_it_and_keeps_it(tmp_path, capsys, main, options):
    assert main([*options, "--mfu", "--out", str(tmp_path)]) == 0
    said = re.search(r"MFU (\S+) %: (\S+) MFLOP a sample", capsys.readouterr().out)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert float(said[1]) == pytest.approx(100 * summary["mfu"], abs=0.06)
    assert summary["mfu"] == pytest.approx(
        summary["flops_per_sample"] * summary["samples_per_second"] / summary["flops_reached"])
    assert 0 < summary["mfu"] < 1


def test_what_it_cannot_count_it_refuses(capsys):
    with pytest.raises(SystemExit):
        gpt.main(["--mfu", "--predict", "2"])
    assert "--mfu --predict 2: the operations of tokens further ahead are not counted" in capsys.readouterr().err
