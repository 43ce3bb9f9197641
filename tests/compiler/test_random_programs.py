"""200 random programs, 20 to a compilation: compiled they give eager's numbers and gradients, to rounding."""

import signal

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.compiler import c_source, compiled, tiles

from .compare import arrays, run
from .programs import Random

TOGETHER = 20
GROUPS = range(10)


LIMIT = 120     # seconds of a group: a plan that goes round in a ring would never end


@pytest.fixture(autouse=True)
def limit():
    def late(*_):
        pytest.fail(f"not through after {LIMIT} s")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def close(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and np.allclose(a, b, rtol=1e-10, atol=1e-11)


def hold(group, emit, together=TOGETHER, device="cpu"):
    """Programs number 20·group and on; fails with the first that is wrong, in words. On a GPU what is compiled there is
    compared with what the host gives."""
    programs = [Random(group * TOGETHER + i) for i in range(together)]
    random = np.random.default_rng(group)
    args = [[random.standard_normal(s) for s in p.shapes] for p in programs]

    def everything(*groups):
        return [p(*xs) for p, xs in zip(programs, groups, strict=True)]
    made = mt.compile(everything, emit=emit)
    for seed in range(2):
        (found, ours), (expected, theirs) = run(made, args, seed, device), run(everything, args, seed)
        assert not made.breaks
        owners = [p for p in programs for _ in p.wanted]
        for p, a, b in zip(owners, found, expected, strict=True):
            assert close(a, b), f"value\n{p}\n{a - b}"
        owners = [p for p in programs for _ in p.shapes]
        for p, a, b in zip(owners, ours, theirs, strict=True):
            assert (a is None) == (b is None) and (a is None or close(a, b)), f"gradient\n{p}\n{a - b}"


@pytest.mark.parametrize("group", GROUPS)
def test_in_c(group, monkeypatch):
    if group % 2:       # sums in blocks, of which the last one is cut off
        monkeypatch.setattr(c_source, "BLOCK", 4)
    hold(group, "c")


@pytest.mark.parametrize("group", GROUPS)
def test_in_tiles(group, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", (1, 4, 10, 64, tiles.TILE)[group % 5])
    hold(group, "numpy")


@pytest.mark.parametrize("group", GROUPS[:3])
def test_c_kernels_in_tiles(group, monkeypatch):
    """Fused ops taken apart, as C has them, and run in tiles that end in the middle of everything."""
    monkeypatch.setattr(tiles, "TILE", (3, 11, 40)[group])
    capture = compiled.Capture
    monkeypatch.setattr(compiled, "Capture", lambda *args: capture(*args[:3], "c", *args[4:]))
    hold(group, "numpy")


def test_programs_are_of_all_kinds():
    """What the generator makes: all its ops, values of 0 to 4 axes, kernels with sums of each role."""
    programs = [Random(seed) for seed in range(len(GROUPS) * TOGETHER)]
    names = {name for p in programs for name, _, _ in p.ops}
    assert len(names) >= 35 and {len(s) for p in programs for s in p.known} >= {0, 1, 2, 3, 4}
    roles = set()
    for p in programs[:40]:
        made = mt.compile(p, emit="numpy")
        assert all(np.isfinite(a).all() for a in arrays(made(*(mt.tensor(np.ones(s)) for s in p.shapes))))
        roles |= {role for variant in made.variants for k in variant.forward_program.schedule.kernels
                  for role in k.roles.values()}
    assert roles == {"full", "row", "column", "scalar"}
