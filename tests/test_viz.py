"""Pictures of differentiation: what they say, and that they are drawn. (Curves: test_compare.py.)"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn
from minitorch_dist.viz.graph import Box, _places, boxes, layers

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG"


def is_png(path, least=5_000):
    return path.read_bytes().startswith(PNG) and path.stat().st_size > least


def network():
    mt.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    loss = nn.cross_entropy(model(mt.tensor(np.ones((5, 8)), dtype=np.float32)), np.array([0, 2, 1, 1, 0]), "sum")
    return model, loss


# ---------------------------------------------------------------- the tape

def test_the_tape_of_a_network_as_text():
    model, loss = network()
    text = mt.viz.graph_text(loss, model)
    assert text == mt.viz.graph(loss, names=model)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["tape:", "5", "ops,", "4", "leaves"]
    assert [line[0] for line in lines[1:]] == [f"%{i}" for i in range(9)]
    assert lines[1][2:] == ["0.weight", "float32[16,8]", "leaf"]
    assert lines[3][2:6] == ["linear(·,", "%0,", "%1)", "float32[5,16]"] and "x," in lines[3]
    assert lines[4][2:] == ["tanh(%2)", "float32[5,16]", "keeps", "ans"]
    assert lines[8][2:5] == ["softmax_cross_entropy(%6)", "float32[5]", "keeps"]
    assert lines[9][2:] == ["sum(%7)", "float32[]"]


def test_unnamed_leaves_several_outputs_and_what_was_freed():
    x, w = mt.tensor(np.ones((2, 4)), requires_grad=True), mt.tensor(np.ones((2, 2)), requires_grad=True)
    a, b = mt.split(x, [2], axis=1)
    y = mt.sum(mt.checkpoint(mt.exp)(a) * b + a @ w)
    text = mt.viz.graph_text(y, {"w": w})
    assert "= leaf 1 " in text and "= w " in text
    assert "several outputs" in text and "output 1(%1)" in text
    assert "checkpoint(exp)" in text and "keeps input" in text
    y.backward()
    assert "(freed)" in mt.viz.graph_text(y)
    with mt.saved_tensors_hooks(lambda a: a, lambda a: a):
        assert "(packed)" in mt.viz.graph_text(mt.exp(x))
    assert mt.viz.graph_text(x).splitlines()[1].split() == ["%0", "=", "leaf", "1", "float64[2,4]", "leaf"]


@pytest.mark.parametrize("name", ["graph.png", "folder/graph.svg"])
def test_the_picture_of_a_tape(tmp_path, name):
    model, loss = network()
    mt.viz.graph(loss, tmp_path / name, model)
    data = (tmp_path / name).read_bytes()
    assert len(data) > 10_000
    assert data.startswith(PNG if name.endswith("png") else b"<?xml")


def test_the_layers_of_the_picture():
    """Every op below all of its inputs, neighbouring rows linked, and nothing on top of anything else."""
    x = mt.tensor(np.ones(3), requires_grad=True)
    h = x
    for _ in range(3):
        h = mt.tanh(mt.exp(h) * 2.0) + h
    shown = boxes(mt.sum(h))
    rows, links = layers(shown)
    row_of = {b: i for i, row in enumerate(rows) for b in row}
    assert all(row_of[below] == row_of[above] + 1 for above, below in links)
    assert all(row_of[i] < row_of[b] for b in shown for i in b.inputs if i is not None)
    assert {b for row in rows for b in row if isinstance(b, Box)} == set(shown)
    places = _places(rows, links)
    assert all(abs(a - b) > 0.75 for row in rows for i, p in enumerate(row) for q in row[:i]
               for a, b in [(places[p][0], places[q][0])])


def test_long_tapes_are_cut_in_text_and_refused_as_a_picture(tmp_path):
    y = mt.tensor(np.ones(2), requires_grad=True)
    for _ in range(10_000):
        y = y * 1.0
    lines = mt.viz.graph_text(y).splitlines()
    assert lines[1] == "  … 9,601 earlier lines left out" and len(lines) == 402
    assert lines[-1].split()[:4] == ["%10000", "=", "mul(%9999,", "·)"]
    with pytest.raises(ValueError, match="10,001 nodes.*60"):
        mt.viz.graph(y, tmp_path / "g.png")
    with pytest.raises(ValueError, match="no tape under this tensor"):
        mt.viz.graph(y.detach())


# ---------------------------------------------------------------- Jacobians and memory

@pytest.mark.parametrize("rows, columns", [(6, 4), (1, 1), (2, 9), (40, 30)])
def test_a_jacobian_filled_by_columns_and_by_rows(tmp_path, rows, columns):
    a = np.random.default_rng(0).standard_normal((rows, columns))
    calls = []
    passes = mt.viz.jacobian_filling(lambda x: calls.append(1) or mt.sin(mt.matmul(a, x)), np.ones(columns),
                                     tmp_path / "new" / "j.png")
    assert passes == (columns, rows)
    assert len(calls) == columns + 1        # one run serves all VJPs
    assert is_png(tmp_path / "new" / "j.png")


def test_memory_over_a_pass(tmp_path):
    x = mt.tensor(np.ones((10, 10)), requires_grad=True)
    with ledger.record(memory=True) as book:
        y = mt.exp(mt.tanh(x)).sum()
        ledger.event("backward")
        y.backward()
    with ledger.record(memory=True) as forward:
        mt.jvp(mt.exp, (np.ones((10, 10)),), (np.ones((10, 10)),))
    assert mt.viz.memory({"reverse": book, "forward": forward}, tmp_path / "m.png", unit=800) == {
        "reverse": 2.0, "forward": 2.0}
    assert is_png(tmp_path / "m.png")
    assert mt.viz.memory({"forward": forward}, tmp_path / "m.png") == {"forward": 1600 / 1e6}
    with ledger.record() as plain:
        pass
    with pytest.raises(ValueError, match="'plain' has counted no activation bytes.*memory=True"):
        mt.viz.memory({"plain": plain}, tmp_path / "m.png")
    with pytest.raises(ValueError, match="no ledger"):
        mt.viz.memory({}, tmp_path / "m.png")


# ---------------------------------------------------------------- the package

def python(*args, **options):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60, check=True, **options)


def test_viz_is_there_without_matplotlib():
    python("-c", "import sys, minitorch_dist as mt\nmt.viz.graph\nassert 'matplotlib' not in sys.modules")


def test_importing_takes_less_than_300_ms_beyond_numpy():
    program = ("import time, numpy, threading\nfrom time import process_time as now\nt = now()\n"
               "import minitorch_dist\nprint(now() - t)")
    assert min(float(python("-c", program).stdout) for _ in range(3)) < 0.3


def test_the_example_runs_and_says_what_the_theory_says(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    example = str(ROOT / "examples" / "differentiation.py")
    out = python(example, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}).stdout
    for words in ("linear program of 2 inputs", "tape: 6 ops, 4 leaves", "4 JVPs or 6 VJPs",
                  "reverse mode: at most 65 activations", "8 checkpoints: at most 16", "forward mode: at most 6"):
        assert words in out
    for name in ("graph", "jacobian", "memory"):
        assert is_png(tmp_path / "runs" / f"{name}.png", 20_000)
