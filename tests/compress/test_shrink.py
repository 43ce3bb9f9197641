"""The smaller model computes what the masked one does."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.compress import prune, shrink
from minitorch_dist.parallel import DistributedDataParallel


def filled(net, seed=0, whole=False):
    """The net with random values everywhere, biases and running statistics too; whole: small whole numbers."""
    random = np.random.default_rng(seed)
    state = {}
    for name, value in net.state_dict().items():
        new = random.integers(-3, 4, value.shape) if whole else random.standard_normal(value.shape) / 2
        state[name] = (abs(new) + 0.5 if name.endswith("running_var") else new).astype(value.dtype)
    net.load_state_dict(state)
    return net.eval()


D, chain = {"dtype": np.float64}, nn.Sequential
NETS = {    # name -> (network, shape of an input, couplings as text)
    "linear": (lambda: chain(nn.Linear(6, 9, **D), nn.ReLU(), nn.Linear(9, 7, False, **D), nn.Tanh(), nn.Dropout(0.3),
                          nn.Linear(7, 4, **D)), (6,), ["0>2/1", "2>5/1"]),
    "convolution": (lambda: chain(nn.Conv2d(3, 6, 3, padding=1, **D), nn.BatchNorm(6, **D), nn.GELU(), nn.MaxPool2d(2),
                               nn.Conv2d(6, 5, 2, **D), nn.BatchNorm(5, **D), nn.LeakyReLU(), nn.AvgPool2d(2),
                               nn.Flatten(), nn.Linear(5 * 2 * 1, 8, **D), nn.ReLU(), nn.Linear(8, 3, **D)),
                    (3, 10, 6), ["0+1>4/1", "4+5>9/2", "9>11/1"]),
    "sequence": (lambda: chain(nn.Conv1d(2, 5, 3, **D), nn.ReLU(), nn.Conv1d(5, 4, 3, **D)), (2, 9), ["0>2/1"]),
    "nested": (lambda: chain(chain(nn.Linear(5, 8, **D), nn.ReLU()), chain(nn.Linear(8, 6, **D), nn.BatchNorm(6, **D)),
                             nn.Tanh(), nn.Linear(6, 2, **D)), (5,), ["0.0>1.0/1", "1.0+1.1>3/1"]),
}


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def said(model):
    return ["+".join((c.maker, *c.norms)) + f">{c.taker}/{c.each}" for c in shrink.couplings(model)]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 1.0])
def test_the_smaller_model_computes_the_same(name, sparsity):
    make, shape, wanted = NETS[name]
    net = filled(make())
    assert said(net) == wanted
    masks = shrink.neurons(net, sparsity)
    prune.Pruning(net, masks)
    small = shrink.shrink(net, masks).eval()
    x = np.random.default_rng(1).standard_normal((4, *shape))
    np.testing.assert_allclose(small(x).numpy(), net(x).numpy(), rtol=0, atol=1e-13)
    for c in shrink.couplings(net):
        before, after = (dict(m.named_modules())[c.maker].weight.shape for m in (net, small))
        assert after[0] == before[0] - min(round(sparsity * before[0]), before[0] - 1)
    assert not {id(p) for p in small.parameters()} & {id(p) for p in net.parameters()}
    assert all(p.requires_grad for p in small.parameters())


def test_with_whole_numbers_to_the_last_bit():
    """Whose sums are exact in any order."""
    net = filled(chain(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 7), nn.ReLU(), nn.Linear(7, 3)),
                 whole=True)
    masks = shrink.neurons(net, 0.5)
    prune.Pruning(net, masks)
    x = np.random.default_rng(2).integers(-4, 5, (5, 3, 4, 4)).astype(np.float32)
    assert shrink.shrink(net, masks)(x).numpy().tobytes() == net(x).numpy().tobytes()


@pytest.mark.parametrize("order", [1, 2])
def test_neurons_of_the_smallest_norm_go(order):
    net = filled(NETS["linear"][0]())
    net[0].weight.data[4] = [2, 0, 0, 0, 0, 0]      # less than the next in all, more in squares
    net[0].weight.data[5] = 0.4
    masks = shrink.neurons(net, 0.4, order)
    w = net[0].weight.numpy()
    norms = [sum(abs(v) ** order for v in row) for row in w]
    gone = sorted(sorted(range(9), key=lambda i: norms[i])[:round(0.4 * 9)])
    assert np.flatnonzero(~masks["0.bias"]).tolist() == gone
    assert (masks["0.weight"] == masks["0.bias"][:, None]).all() and set(masks) == {"0.weight", "0.bias", "2.weight"}


def test_rows_of_which_something_stays_are_kept():
    """A mask that isn't one of whole neurons: of them only those that nothing is left of go, with their bias."""
    net = filled(NETS["linear"][0]())
    masks = {"0.weight": np.ones((9, 6), bool), "0.bias": np.ones(9, bool)}
    masks["0.weight"][[2, 5]] = masks["0.weight"][3, :4] = False
    masks["0.bias"][[2, 3]] = False
    prune.Pruning(net, masks)
    small = shrink.shrink(net, masks)
    assert small[0].weight.shape == (8, 6) and small[2].weight.shape == (7, 8)
    x = np.random.default_rng(1).standard_normal((4, 6))
    np.testing.assert_allclose(small.eval()(x).numpy(), net(x).numpy(), rtol=0, atol=1e-13)


def test_a_gpts_feed_forward_layers_shrink():
    net = filled(nn.GPT(11, 5, layers=2, heads=2, dim=8, **D))
    assert [c.maker.rsplit(".", 1)[0] for c in shrink.couplings(net)] == [c.taker.rsplit(".", 1)[0]
                                                                          for c in shrink.couplings(net)]
    assert len(said(net)) == 2
    masks = shrink.neurons(net, 0.5)
    prune.Pruning(net, masks)
    small, tokens = shrink.shrink(net, masks), np.random.default_rng(0).integers(0, 11, (3, 5))
    np.testing.assert_allclose(small(tokens).numpy(), net(tokens).numpy(), rtol=0, atol=1e-12)
    assert sum(p.size for p in small.parameters()) < sum(p.size for p in net.parameters())


def test_what_is_not_taken_by_one_layer_alone_is_left():
    shared = nn.Linear(5, 5)
    assert said(chain(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(5, 2))) == []
    tied = chain(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    tied[2].weight = tied[0].weight
    assert said(tied) == []
    assert said(chain(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 2))) == []      # makes 0.5 of 0
    assert said(chain(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))) == []   # whose mean is over all neurons
    assert said(chain(nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 3))) == []
    elsewhere = nn.Module()
    elsewhere.layers = chain(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    elsewhere.first = elsewhere.layers[0]
    assert said(elsewhere) == []
    assert said(chain(nn.Linear(5, 4), Residual(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))) == []
    with pytest.raises(ValueError, match="no layer of this model"):
        shrink.neurons(nn.Linear(5, 4), 0.5)


def test_what_would_be_lost_raises():
    net = filled(NETS["linear"][0]())
    masks = shrink.neurons(net, 0.5)
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias, 2\.weight: some weights under the mask aren't zero"):
        shrink.shrink(net, masks)
    for share in (1.5, -0.1):
        with pytest.raises(ValueError, match=f"sparsity={share}"):
            shrink.neurons(net, share)
    for order in (0, -1, 3, np.inf, "fro"):
        with pytest.raises(ValueError, match=f"order={order!r}: norms are of order 1 or 2"):
            shrink.neurons(net, 0.5, order)
    assert all(mask.all() for mask in shrink.neurons(net, 0).values())
    with pytest.raises(TypeError, match="model.module"):
        shrink.shrink(DistributedDataParallel(net), {})


def test_frozen_parameters_stay_frozen():
    net = filled(NETS["linear"][0]())
    net[0].weight.requires_grad_(False)
    masks = shrink.neurons(net, 0.5)
    prune.Pruning(net, masks)
    small = shrink.shrink(net, masks)
    assert not small[0].weight.requires_grad and small[0].bias.requires_grad
    assert [n for n, _ in small.named_parameters()] == [n for n, _ in net.named_parameters()]
    small(mt.tensor(np.ones((2, 6)))).sum().backward()
    assert small[2].weight.grad.shape == small[2].weight.shape


FLATTENED = {   # name -> (network, shape of an input): layers whose outputs aren't the next one's inputs
    "features of a sequence": (lambda: chain(nn.Linear(4, 6, **D), nn.ReLU(), nn.Flatten(), nn.Linear(30, 3, **D)),
                               (5, 4)),
    "a Linear along the width": (lambda: chain(nn.Conv2d(1, 4, 3, padding=1, **D), nn.ReLU(), nn.Linear(8, 3, **D)),
                                 (1, 8, 8)),
    "a convolution over features": (lambda: chain(nn.Linear(10, 4, **D), nn.ReLU(), nn.Conv1d(4, 8, 3, **D)), (4, 10)),
    "a norm of positions": (lambda: chain(nn.Conv2d(1, 4, 3, padding=1, **D), nn.Flatten(), nn.BatchNorm(64, **D),
                                          nn.ReLU(), nn.Linear(64, 3, **D)), (1, 4, 4))}


@pytest.mark.parametrize("name", FLATTENED)
def test_what_only_looks_like_a_pair_is_none(name):
    make, shape = FLATTENED[name]
    net = filled(make())
    assert shrink.couplings(net) == []
    weight = next(n for n, _ in net.named_parameters() if n.endswith("weight"))
    mask = np.ones(dict(net.named_parameters())[weight].shape, bool)
    mask[0] = False
    prune.Pruning(net, {weight: mask})
    x = np.random.default_rng(1).standard_normal((7, *shape))
    np.testing.assert_array_equal(shrink.shrink(net, {weight: mask})(x).numpy(), net(x).numpy())
