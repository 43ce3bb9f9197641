"""Values and gradients against torch, where it is installed. It is never the only check: finite differences decide."""

import numpy as np
import pytest

import minitorch_dist as mt

torch = pytest.importorskip("torch")
F = torch.nn.functional
rng = np.random.default_rng(13)


def normal(*shape):
    return rng.standard_normal(shape)


IDS = np.array([[2, 0], [2, 1]])
MASK = np.tri(3, 5, 2, dtype=bool)
CASES = {
    "gelu": (mt.gelu, F.gelu, normal(3, 4)),
    "gelu tanh": (lambda x: mt.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), normal(3, 4)),
    "swiglu": (mt.swiglu, lambda gate, up: F.silu(gate) * up, normal(3, 4), normal(3, 4)),
    "erf": (mt.erf, torch.erf, normal(20)),
    "conv1d": (lambda x, w, b: mt.conv1d(x, w, b, 2, 1, 2), lambda x, w, b: F.conv1d(x, w, b, 2, 1, 2),
               normal(2, 3, 9), normal(4, 3, 3), normal(4)),
    "conv2d": (lambda x, w, b: mt.conv2d(x, w, b, (2, 1), (1, 0), (1, 2), 2),
               lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 0), (1, 2), 2),
               normal(2, 4, 7, 6), normal(6, 2, 3, 2), normal(6)),
    "conv_transpose2d": (lambda x, w, b: mt.conv_transpose2d(x, w, b, 2, 1, 1, 2),
                         lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2),
                         normal(2, 4, 3, 4), normal(4, 3, 3, 3), normal(6)),
    "max_pool2d": (lambda x: mt.max_pool2d(x, 3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1), normal(2, 3, 6, 7)),
    "avg_pool2d": (lambda x: mt.avg_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 2, 1), normal(2, 3, 6, 7)),
    "avg_pool2d without padding": (lambda x: mt.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
                                   lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), normal(2, 3, 6, 7)),
    "layer_norm": (lambda x, w, b: mt.layer_norm(x, (3, 4), w, b), lambda x, w, b: F.layer_norm(x, (3, 4), w, b),
                   normal(2, 3, 4), normal(3, 4), normal(3, 4)),
    "rms_norm": (lambda x, w: mt.rms_norm(x, 4, w), lambda x, w: F.rms_norm(x, (4,), w), normal(2, 3, 4), normal(4)),
    "batch_norm": (lambda x, w, b: mt.batch_norm(x, w, b)[0],
                   lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
                   normal(4, 3, 5), normal(3), normal(3)),
    "attention": (lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, is_causal=True),
                  lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                  normal(2, 4, 5, 3), normal(2, 2, 5, 3), normal(2, 2, 5, 3)),
    "attention masked": (lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, MASK),
                         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.tensor(MASK)),
                         normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 4)),
    "attention with a mask that is learned": (
        mt.scaled_dot_product_attention, F.scaled_dot_product_attention,
        normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 4), normal(2, 3, 5)),
    "softmax": (lambda x: mt.softmax(x, 0), lambda x: torch.softmax(x, 0), normal(3, 4)),
    "log_softmax": (mt.log_softmax, lambda x: torch.log_softmax(x, -1), normal(3, 4)),
    "embedding": (lambda w: mt.embedding(IDS, w), lambda w: F.embedding(torch.tensor(IDS), w), normal(3, 4)),
    "gather": (lambda x: x.gather(0, IDS), lambda x: x.gather(0, torch.tensor(IDS)), normal(3, 2)),
    "var": (lambda x: x.var(dim=1), lambda x: x.var(dim=1), normal(3, 4)),
    "prod": (lambda x: mt.prod(x, 1), lambda x: x.prod(1), np.array([[1.0, 0, 3], [0, 2, 0], [2, 3, 4]])),
    "cumsum": (lambda x: mt.cumsum(x, 1), lambda x: x.cumsum(1), normal(3, 4)),
    "topk": (lambda x: x.topk(2, dim=0)[0], lambda x: x.topk(2, dim=0)[0], normal(5, 2)),
    "einsum": (lambda x, y: mt.einsum("...iij,kj->k...i", x, y), lambda x, y: torch.einsum("...iij,kj->k...i", x, y),
               normal(2, 3, 3, 4), normal(5, 4)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.5), normal(3, 4)),
    "remainder": (lambda x: x % 0.7, lambda x: x % 0.7, normal(3, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name):
    ours, theirs, *args = CASES[name]
    mine = [mt.tensor(a, requires_grad=True) for a in args]
    others = [torch.tensor(a, requires_grad=True) for a in args]
    y, z = ours(*mine), theirs(*others)
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-10, atol=1e-12)
    u = normal(*y.shape)
    y.backward(mt.tensor(u))
    z.backward(torch.tensor(u))
    for a, b in zip(mine, others, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-9, atol=1e-11)
