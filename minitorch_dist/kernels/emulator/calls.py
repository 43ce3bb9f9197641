"""A call of each kernel that is small enough to be emulated in a second or two: what `kernels NAME --count` runs."""

import numpy as np

from .. import load
from .memory import aligned


def draw(*shape, dtype=np.float32, seed=0):
    """Normal numbers in an array that begins where one of CuPy's would."""
    return aligned(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype))


def whole(limit, n):
    return aligned(np.random.default_rng(n).integers(0, limit, n))


def add(module, lent):
    module.add(draw(10_000), draw(10_000, seed=1))


def adam(module, lent):
    """Parameters of three lengths, whose arrays are found by a table of addresses."""
    parameters = [{name: aligned(np.abs(draw(size, seed=i))) for i, name in enumerate(("p", "g", "m", "v"))}
                  for size in (8192, 512, 1024)]
    lent += [array for arrays in parameters for array in arrays.values()]
    module.Update(parameters, [0] * len(parameters))([(1e-3, (0.9, 0.999), 1e-8, 0.01)] * len(parameters))


def cross_entropy(module, lent):
    logits, labels = draw(16, 1000), whole(1000, 16)
    _, kept = module.softmax_cross_entropy(logits, labels)
    module.pullback(draw(16), (True,), logits, labels, None, kept)


def outside(module, lent):
    module.outside(whole(50, 5000), 0, 50, -100)


def norms(module, lent):
    x, weight = draw(64, 768), draw(768)
    _, kept = module.layer_norm(x, weight, draw(768, seed=1), 1, 1e-5)
    module.layer_norm_pullback(draw(64, 768, seed=2), (True, True, True), x, weight, 1, kept)


def gelu(module, lent):
    x, bias = draw(64, 512), draw(512)
    module.bias_gelu(x, bias, "tanh")
    module.bias_gelu_gradient(draw(64, 512, seed=1), x, bias, "tanh")


def swiglu(module, lent):
    """Gate and up are the halves of one matrix."""
    both = draw(64, 1024)
    module.swiglu(both[:, :512], both[:, 512:])
    module.swiglu_gradient(draw(64, 512, seed=1), both[:, :512], both[:, 512:])


def dropout(module, lent):
    module.dropout(draw(10_000), 0.1, 7)
    module.philox_uniform(7, 0, 10_000, draw(1))


def columns(module, lent):
    module.column_sums(draw(512, 300))


def segments(module, lent):
    """200 tokens' rows into a table of 50, of which few get many."""
    module.segment_sums(draw(200, 64), whole(50, 200), 50)


def matmul(module, lent):
    module.matmul(draw(128, 96, dtype=np.float16), draw(96, 128, dtype=np.float16))


def attention(module, lent):
    q, k, v = (draw(1, 2, 128, 64, dtype=np.float16, seed=i) for i in range(3))
    _, kept = module.flash_attention(q, k, v, module.CAUSAL, 0.125)
    module.flash_attention_gradient(draw(1, 2, 128, 64, dtype=np.float16, seed=3), q, k, v, module.CAUSAL, 0.125, kept)


# Module -> (what is called, the call of it).
CALLS = {
    "add": ("two arrays of 10,000", add),
    "adam": ("AdamW on parameters of 8,192, 512 and 1,024 elements", adam),
    "softmax_cross_entropy": ("16 rows of 1,000 logits", cross_entropy),
    "outside": ("5,000 numbers", outside),
    "column_sums": ("(512, 300)", columns),
    "segment_sums": ("200 rows of 64 into 50", segments),
    "norms": ("layer norm of (64, 768)", norms),
    "bias_gelu": ("(64, 512) and a bias", gelu),
    "swiglu": ("the halves of (64, 1,024)", swiglu),
    "dropout": ("10,000 numbers", dropout),
    "matmul": ("(128, 96) · (96, 128) in float16", matmul),
    "flash_attention": ("1 text, 2 heads of 64, 128 positions, causal, float16", attention),
}


def counted(module, capability):
    """[Counts] of every launch of a module's call on a GPU of this compute capability."""
    from . import Emulator, emulated
    emulator = Emulator(capability, lent=[])
    with emulated(emulator) as launches:
        CALLS[module][1](load(module), emulator.lent)
    return launches
