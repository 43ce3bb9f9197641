"""Rotary positions, and what becomes of their angles where a model is stretched to longer sequences."""

import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.nn import Rotary
from tests.nn.test_transformer import random

YARN, LLAMA_3_1 = Rotary(10_000, 4, 4096), Rotary(500_000, 8, 8192, blend=(1, 4), sharpness=0)


@pytest.mark.parametrize("rotary", [Rotary(), Rotary(50, 3, 7), Rotary(20, 5, blend=None)], ids=str)
def test_products_depend_on_the_distance_only(rotary):
    q, k = random(0).standard_normal((2, 6))
    products = {}
    turned_q, turned_k = (rotary.turn(mt.tensor(np.broadcast_to(v, (1, 1, 12, 6)).copy())).numpy()[0, 0]
                          for v in (q, k))
    for t in range(12):
        for s in range(12):
            products.setdefault(t - s, []).append(turned_q[t] @ turned_k[s])
    assert all(np.ptp(p) < 1e-12 for p in products.values())
    np.testing.assert_allclose(products[0][0], q @ k)
    assert len({round(p[0], 6) for p in products.values()}) == 23      # and every distance gives something else
    np.testing.assert_allclose(np.linalg.norm(turned_q, axis=1), np.linalg.norm(q))
    assert rotary.turn(mt.tensor(np.ones((1, 1, 3, 4), np.float32))).dtype == np.float32
    with pytest.raises(ValueError, match="a head has 3"):
        rotary.turn(mt.tensor(np.ones((1, 1, 2, 3))))


def test_llama_3_1_by_its_wavelengths():
    """As the paper's authors say it: waves shorter than 8192/4 stay, those longer than 8192 are 8 times as long, and
    between the two, frequencies are mixed in proportion to 8192/wavelength."""
    found, kinds = LLAMA_3_1.frequencies(128), set()
    for j, got in enumerate(found):
        wave = 2 * math.pi * 500_000 ** (2 * j / 128)
        if wave < 2048:
            kind, wanted = "short", 2 * math.pi / wave
        elif wave > 8192:
            kind, wanted = "long", 2 * math.pi / (8 * wave)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            kind, wanted = "between", (1 - smooth) * 2 * math.pi / wave / 8 + smooth * 2 * math.pi / wave
        kinds.add(kind)
        assert math.isclose(got, wanted, rel_tol=1e-12)
    assert kinds == {"short", "between", "long"}
    assert LLAMA_3_1.factor == 1


def test_yarn_leaves_fast_pairs_and_slows_down_slow_ones():
    learned, stretched = Rotary().frequencies(64), YARN.frequencies(64)
    turns = 4096 * learned / (2 * math.pi)
    np.testing.assert_allclose(stretched[turns >= 32], learned[turns >= 32], rtol=1e-15)
    np.testing.assert_allclose(stretched[turns <= 1], learned[turns <= 1] / 4, rtol=1e-15)
    ratio = (learned / stretched)[(turns > 1) & (turns < 32)]
    assert 4 < len(ratio) and np.all(np.diff(ratio) > 0) and 1 < ratio[0] and ratio[-1] < 4
    # A pair of exactly 16.5 turns is in the middle between 1 and 32: half of it is slowed down.
    base = (4096 / (2 * math.pi * 16.5)) ** 2       # of the second pair of 4 features: base^(-1/2)
    got = Rotary(base, 4, 4096).frequencies(4)[1]
    assert math.isclose(got, (1 + 1 / 4) / 2 * 2 * math.pi * 16.5 / 4096, rel_tol=1e-12)
    assert Rotary(base, 4, 4096, blend=(0, 33)).frequencies(4)[1] == pytest.approx(got, rel=1e-12)


@pytest.mark.parametrize("stretch, root", [(1, 1.0), (16, 1.2772588722), (32, 1.3465735903)])
def test_yarn_s_temperature(stretch, root):
    """√(1/t) = 0.1 ln s + 1 (equation 22)."""
    assert math.isclose(Rotary(stretch=stretch, length=64).factor, root ** 2, rel_tol=1e-10)


def test_interpolated_positions_are_those_between():
    x = mt.tensor(random(1).standard_normal((2, 3, 5, 8)))
    longer = Rotary(100, 4, blend=None).turn(x, np.array([0, 4, 8, 40, 13])).numpy()
    shorter = Rotary(100).turn(x, np.array([0, 1, 2, 10, 3.25])).numpy()
    np.testing.assert_allclose(longer, shorter, rtol=0, atol=1e-13)


def test_heads_of_an_odd_size_are_refused_when_they_are_made():
    for make in (lambda: nn.MultiHeadAttention(12, 4, rotary=True), lambda: nn.MultiHeadAttention(4, 4, rotary=YARN),
                 lambda: nn.GPT(11, 8, layers=1, heads=4, dim=12, positions="rotary")):
        with pytest.raises(ValueError, match="turn pairs of features, but a head has [13]"):
            make()
    assert nn.MultiHeadAttention(12, 4).size == 3


@pytest.mark.parametrize("layer", [
    lambda rotary: nn.MultiHeadAttention(12, 3, causal=True, rotary=rotary, dtype=np.float64, std=0.7),
    lambda rotary: nn.LatentAttention(12, 3, causal=True, rotary=rotary, dtype=np.float64, std=0.7)])
def test_scores_of_stretched_sequences_are_sharper(layer):
    """Softmax of more is that of the scores, times as much."""
    layers = [layer(Rotary(100, 9, 4, sharpness=sharpness)) for sharpness in (0, 0.1)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = mt.tensor(random(2).standard_normal((2, 7, 12)))
    usual, sharper = (lower.weights(x) for lower in layers)
    powers = np.where(usual > 0, usual, 0.0) ** (1 + 0.1 * math.log(9)) ** 2
    np.testing.assert_allclose(sharper, powers / powers.sum(-1, keepdims=True), rtol=1e-10)
    layers[0].scale = 0.3       # a scale of one's own (mup.py) is multiplied as well
    layers[1].scale = 0.3 / layers[1].rotary.factor
    np.testing.assert_allclose(*(lower.weights(x) for lower in layers), rtol=1e-10)


def test_a_longer_model_takes_the_parameters_of_a_shorter_one():
    mt.manual_seed(0)
    short = nn.GPT(11, 8, layers=2, heads=2, dim=8, positions="rotary", dtype=np.float64)
    long = nn.GPT(11, 32, layers=2, heads=2, dim=8, positions=Rotary(stretch=4, length=8), dtype=np.float64)
    long.load_state_dict(short.state_dict())
    tokens = random(3).integers(0, 11, (2, 32))
    assert long(tokens).shape == (2, 32, 11)
    same = nn.GPT(11, 8, layers=2, heads=2, dim=8, positions=Rotary(), dtype=np.float64)
    same.load_state_dict(short.state_dict())
    np.testing.assert_array_equal(same(tokens[:, :8]).numpy(), short(tokens[:, :8]).numpy())
    assert "rotary=Rotary(base=10000.0, stretch=4, length=8" in repr(long) and "Rotary" not in repr(short) + repr(same)


@pytest.mark.parametrize("wrong, error, said", [
    (lambda: Rotary(1), ValueError, "base=1 must be above 1"),
    (lambda: Rotary(math.inf), ValueError, "base=inf"),
    (lambda: Rotary(stretch=0.5, length=4), ValueError, "stretch=0.5 1 or more"),
    (lambda: Rotary(stretch=math.nan, length=4), ValueError, "stretch=nan"),
    (lambda: Rotary(stretch=math.inf, length=4), ValueError, "stretch=inf"),
    (lambda: Rotary(blend=(2, 2)), ValueError, r"blend=\(2, 2\)"),
    (lambda: Rotary(sharpness=math.inf), ValueError, "sharpness=inf"),
    (lambda: Rotary(stretch=2), ValueError, "length=None must be that of the sequences it was learned with"),
    (lambda: Rotary(stretch=2, length=0), ValueError, "length=0"),
    (lambda: Rotary(stretch=2, length=4, blend=(4, 1)), ValueError, r"blend=\(4, 1\) must be"),
    (lambda: Rotary(stretch=2, length=4, blend=(1, math.inf)), ValueError, "blend"),
    (lambda: Rotary(blend=(1,)), ValueError, r"blend=\(1,\) must be \(slow, fast\)"),
    (lambda: Rotary(sharpness=-1), ValueError, "sharpness=-1"),
    (lambda: nn.MultiHeadAttention(8, 2, rotary="yarn"), TypeError, "rotary='yarn'; use True, False or a Rotary"),
    (lambda: nn.LatentAttention(8, 2, rotary=False), ValueError, "rotary=False, but what isn't turned is nope_size"),
    (lambda: nn.GPT(5, 8, positions=True), ValueError, "'learned', 'rotary' or a Rotary")])
def test_what_is_no_rotary(wrong, error, said):
    with pytest.raises(error, match=said):
        wrong()
