"""Samples for every entry of the op table: functions and arguments whose true gradients are far from 0.

Dimensions are unequal, so that a wrong axis can't pass; arguments keep away from
kinks and poles by more than a finite difference's step. `covers` is the table
entry that the sample tests; test_table.py fails on an entry without one.
"""

from dataclasses import dataclass

import numpy as np

import minitorch_dist as mt
from minitorch_dist.autodiff.ops.attention import greatest_scores
from minitorch_dist.autodiff.ops.chosen_blocks import greatest_block_scores
from minitorch_dist.autodiff.primitive import bind

rng = np.random.default_rng(7)


@dataclass
class Sample:
    covers: str
    function: object
    args: tuple
    label: str = ""
    linear: str = ""        # "each": linear in every argument while the others are fixed; "first": in the first

    @property
    def id(self):
        return f"{self.covers}-{self.label}" if self.label else self.covers


def normal(*shape):
    return rng.standard_normal(shape)


def positive(*shape):
    return rng.uniform(0.5, 2.0, shape)


def away_from_zero(*shape):
    return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.4, 2.0, shape)


def distinct(*shape):
    """Values at least 0.1 apart: no finite difference changes their order."""
    return (rng.permutation(int(np.prod(shape))) * 0.1 + rng.uniform(0, 0.02, int(np.prod(shape)))).reshape(shape) - 0.5


LABELS = np.array([2, 0, 4])
ROWS = np.array([2, 0, 0, 1])
ZEROS = np.zeros((2, 3, 4), bool)
ZEROS[0, 1, 2] = ZEROS[1, 2, 0] = ZEROS[0, 2, 3] = True      # line 0 has none, line 1 one, line 2 two zeros
ORDER = np.argsort(normal(3, 4), 1)
WEIGHTS = np.arange(12.0).reshape(3, 4)
MASK = np.array([[True, False, True, True], [False, True, True, False], [True, True, False, False]])
BIAS = np.where(MASK, WEIGHTS / 6 - 1, -np.inf)
DOCUMENTS = np.array([[0, 0, 1, 1, 1], [4, 2, 4, 2, 4]])

SAMPLES = [
    # elementwise, with broadcasting both ways
    *(Sample(name, getattr(mt, name), (a, b), label)
      for name in ("add", "sub", "mul")
      for label, a, b in (("same", normal(3, 4), normal(3, 4)), ("row", normal(3, 4), normal(4)),
                          ("outer", normal(3, 1), normal(1, 4)), ("0-d", normal(), normal(2, 3)))),
    *(Sample("div", mt.div, (a, b), label)
      for label, a, b in (("same", normal(3, 4), away_from_zero(3, 4)),
                          ("column", normal(2, 3), away_from_zero(2, 1)))),
    Sample("power", mt.power, (positive(3, 4), normal(4))),
    Sample("power", lambda x: x ** 3, (normal(3, 4),), "number"),
    Sample("power", lambda x: 2.0 ** x, (normal(3, 4),), "of a number"),
    Sample("maximum", mt.maximum, (distinct(3, 4), distinct(3, 4) + 0.05)),
    Sample("maximum", lambda x: mt.maximum(x, 0.3), (distinct(5, 3),), "number"),
    Sample("minimum", mt.minimum, (distinct(3, 4), distinct(4) + 0.05)),
    *(Sample(name, getattr(mt, name), (normal(3, 5),)) for name in
      ("exp", "expm1", "sin", "cos", "tanh", "sigmoid", "neg", "erf", "square")),
    *(Sample(name, getattr(mt, name), (positive(3, 5),)) for name in ("log", "log1p", "sqrt", "rsqrt", "reciprocal")),
    Sample("mod", mt.mod, (away_from_zero(3, 4) + np.array([[8.0], [4.0], [-4.0]]), np.array([2.9, -2.8, 3.1, 5.1]))),
    Sample("clip", lambda x: mt.clip(x, -0.25, 0.5) * x, (distinct(3, 5),)),
    Sample("relu", mt.relu, (away_from_zero(3, 5),)),
    Sample("abs", mt.absolute, (away_from_zero(3, 5),)),
    Sample("where", lambda x, y: mt.where(MASK, x, y), (normal(3, 4), normal(4))),
    Sample("astype", lambda x: mt.astype(mt.exp(mt.astype(x, np.float64)), np.float64), (normal(2, 3),), "same"),
    Sample("to_device", lambda x: mt.exp(bind(mt.OPS["to_device"], (x,), ("cpu", "cpu"))), (normal(2, 3),)),
    # shape
    Sample("reshape", lambda x: mt.exp(mt.reshape(x, (2, 6))), (normal(3, 4),)),
    Sample("reshape", lambda x: mt.sin(mt.reshape(x, -1, 2)), (normal(3, 4),), "unknown"),
    Sample("transpose", lambda x: mt.exp(mt.transpose(x, (2, 0, 1))), (normal(2, 3, 4),)),
    Sample("transpose", lambda x: mt.sin(mt.transpose(x, (1, 2, 0))), (normal(2, 3, 4),), "cycle"),
    Sample("concatenate", lambda x, y: mt.exp(mt.concatenate([x, y], 1)), (normal(2, 3), normal(2, 1))),
    Sample("split", lambda x: (lambda a, b, c: mt.exp(a) * mt.sin(c))(*mt.split(x, (2, 3), 1)), (normal(3, 5),)),
    Sample("pick", lambda x: mt.exp(mt.split(x, (1,))[1]), (normal(5, 2),)),
    Sample("arrange", lambda x, y: mt.exp(mt.stack([mt.flip(x, 1), mt.squeeze(mt.expand_dims(y, 0), 0)], 1))
           * mt.moveaxis(mt.pad(mt.tile(x, (1, 2)), ((0, 0), (1, 0)), constant_values=0.5)[:, :6].reshape(3, 2, 3),
                         1, 2).swapaxes(1, 2), (normal(3, 3), normal(3, 3))),
    Sample("repeat", lambda x: mt.sin(mt.repeat(x, 2, 0)) * mt.flatten(mt.repeat(x, 4)[:, None]).reshape(4, 6)[:, :3],
           (normal(2, 3),)),
    # reductions
    Sample("sum", lambda x: mt.exp(mt.sum(x, 1)), (normal(3, 4),), "axis"),
    Sample("sum", lambda x: mt.exp(mt.sum(x, (0, -1), keepdims=True)), (normal(2, 3, 2),), "axes"),
    Sample("sum", mt.sum, (normal(3, 4),), "all"),
    Sample("broadcast_to", lambda x: mt.sin(mt.broadcast_to(x, (4, 2, 3))), (normal(2, 1),)),
    *(Sample(name, lambda x, name=name: getattr(mt, name)(x, 1) * getattr(mt, name)(x), (distinct(3, 4),))
      for name in ("max", "min", "prod")),
    Sample("prod", lambda x: mt.prod(mt.where(ZEROS, 0.0, x), (0, 2)) + mt.prod(x, -1, keepdims=True),
           (away_from_zero(2, 3, 4),), "zeros"),
    Sample("cumsum", lambda x: mt.exp(mt.cumsum(x, 0)), (normal(4, 3),)),
    Sample("cumsum", lambda x: mt.sin(mt.cumsum(x)), (normal(2, 3),), "flat"),
    Sample("max", lambda x: mt.max(x, (0, 2), keepdims=True), (distinct(2, 3, 4),), "axes"),
    # indexing
    Sample("getitem", lambda x: mt.exp(x[1:, ::-2]), (normal(3, 5),), "slices"),
    Sample("getitem", lambda x: mt.exp(x[ROWS]) * x[1], (normal(3, 4),), "repeated"),
    Sample("getitem", lambda x: mt.sin(x[MASK]), (normal(3, 4),), "mask"),
    Sample("getitem", lambda x: mt.sin(x[..., None, LABELS]), (normal(2, 5),), "mixed"),
    Sample("scatter_add", lambda x: mt.exp(mt.scatter_add(x, ROWS, (3, 2))), (normal(4, 2),)),
    Sample("reorder", lambda x: mt.exp(mt.ops.indexing.reorder(x, ORDER, -1)), (normal(3, 4),)),
    Sample("take_along_axis", lambda x: mt.exp(mt.take_along_axis(x, ORDER[:, [0, 0, 2]], 1)), (normal(3, 4),)),
    Sample("take", lambda x: mt.exp(mt.take(x, ROWS, 1)) * mt.take(x, [7, 0, -1, 7]), (normal(2, 4),)),
    Sample("topk", lambda x: mt.topk(x, 2, 0)[0] * mt.topk(x, 2, 0, largest=False)[0], (distinct(4, 3),)),
    Sample("embedding", lambda w: mt.exp(mt.embedding(ROWS.reshape(2, 2), w)), (normal(3, 2),)),
    Sample("sort", lambda x: mt.sort(x, 0) * WEIGHTS.astype(x.dtype), (distinct(3, 4),)),
    # contractions
    *(Sample("matmul", mt.matmul, (normal(*a), normal(*b)), f"{a}@{b}") for a, b in (
        ((2, 3), (3, 4)), ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (4, 3, 2)), ((3,), (2, 3, 4)), ((2, 4, 3), (3,)))),
    Sample("linear", mt.linear, (normal(3, 4), normal(2, 4), normal(2))),
    Sample("linear", mt.linear, (normal(2, 3, 4), normal(5, 4), normal(5)), "3-d"),
    *(Sample("einsum", lambda *xs, subscripts=subscripts: mt.einsum(subscripts, *xs), tuple(normal(*s) for s in shapes),
             subscripts) for subscripts, *shapes in (
        ("ij,jk->ik", (2, 3), (3, 4)), ("ij,jk", (2, 3), (3, 2)), ("ij->ji", (2, 3)), ("ii->i", (3, 3)), ("ii", (3, 3)),
        ("iji,jk->k", (2, 3, 2), (3, 4)), ("bij,bjk,kb->bi", (2, 3, 2), (2, 2, 3), (3, 2)), ("i,j->ij", (2,), (3,)),
        ("...ij,...jk->...ik", (2, 1, 2, 3), (4, 3, 2)), ("ij,kj->", (2, 3), (4, 3)), ("ij,ij->ij", (1, 3), (2, 3)),
        ("i...,i->...", (2, 3, 2), (2,)), (",ij->j", (), (2, 3)))),
    Sample("tensordot", lambda x, y: mt.tensordot(x, y, ((0, 2), (1, 0))) * mt.tensordot(x, y, 1)[0, 0, 0, 0],
           (normal(2, 3, 4), normal(4, 2, 2))),
    *(Sample(op.__name__, lambda x, y, op=op, counts=counts: op(x, y, counts), (normal(5, 3), normal(*shape)),
             f"{counts}") for counts in ((3, 2), (0, 4, 0, 1), (5,))
      for op, shape in ((mt.grouped_matmul, (len(counts), 3, 4)), (mt.grouped_outer, (5, 4)))),
    Sample("outer", mt.outer, (normal(2, 2), normal(3))),
    Sample("windows", lambda x: mt.exp(mt.ops.windows.windows(x, (2,), (1,), (2,))), (normal(2, 5),)),
    Sample("windows", lambda x: mt.sin(mt.ops.windows.windows(x, (2, 3), (2, 1), (1, 1))), (normal(5, 4),), "2-d"),
    Sample("fold", lambda c: mt.exp(mt.ops.windows.fold(c, (6,), (3,), (2,), (1,))), (normal(2, 2, 3),)),
    Sample("conv", mt.conv1d, (normal(2, 2, 6), normal(3, 2, 3), normal(3)), "1-d"),
    Sample("conv", lambda x, w, b: mt.conv2d(x, w, b, (2, 1), (1, 2), (1, 2), 2),
           (normal(2, 4, 4, 3), normal(2, 2, 3, 2), normal(2)), "2-d"),
    Sample("conv", lambda x, w: mt.conv2d(x, w, stride=2), (normal(1, 2, 4, 5), normal(3, 2, 2, 3)), "no bias"),
    Sample("conv_transpose", lambda x, w, b: mt.conv_transpose2d(x, w, b, (2, 1), (1, 0), (1, 0), 2, (1, 2)),
           (normal(1, 4, 2, 3), normal(4, 1, 3, 2), normal(2))),
    Sample("max_pool", lambda x: mt.max_pool2d(x, (3, 2), (2, 1), 1), (distinct(2, 2, 4, 3),)),
    Sample("max_pool", lambda x: mt.exp(mt.max_pool1d(x, 2, dilation=2, stride=1)), (distinct(2, 2, 5),), "1-d"),
    Sample("avg_pool", lambda x: mt.exp(mt.avg_pool2d(x, (3, 2), (2, 1), 1)), (normal(2, 2, 4, 3),)),
    Sample("avg_pool", lambda x: mt.exp(mt.avg_pool1d(x, 3, 2, 1, count_include_pad=False)), (normal(2, 1, 5),), "1-d"),
    # fused and composed
    Sample("gelu", lambda x: mt.gelu(x), (normal(3, 5),)),
    Sample("gelu", lambda x: mt.gelu(x, approximate="tanh"), (normal(3, 5),), "tanh"),
    Sample("linear_gelu", mt.linear_gelu, (normal(3, 4), normal(2, 4), normal(2))),
    Sample("linear_gelu", lambda x, w, b: mt.linear_gelu(x, w, b, "tanh"), (normal(2, 3, 4), normal(5, 4), normal(5)),
           "tanh, 3-d"),
    Sample("swiglu", mt.swiglu, (normal(3, 4), normal(3, 4))),
    Sample("layer_norm", lambda x, w, b: mt.layer_norm(x, (3, 4), w, b), (normal(2, 3, 4), normal(3, 4), normal(3, 4))),
    Sample("layer_norm", lambda x: mt.exp(mt.layer_norm(x, 4, eps=0.1)), (normal(3, 4),), "plain"),
    Sample("rms_norm", lambda x, w: mt.rms_norm(x, 4, w, eps=1e-3), (normal(2, 3, 4), normal(4))),
    Sample("rms_norm", lambda x: mt.exp(mt.rms_norm(x, (3, 2))), (normal(4, 3, 2),), "plain"),
    Sample("batch_norm", lambda x, w, b: mt.batch_norm(x, w, b)[0], (normal(3, 2, 4), normal(2), normal(2))),
    Sample("batch_norm", lambda x: (lambda y, m, v: mt.sin(y) * m * v)(*mt.batch_norm(x, eps=0.1)), (normal(4, 3),),
           "all outputs"),
    Sample("attention", mt.scaled_dot_product_attention, (normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 2))),
    Sample("attention", lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7),
           (normal(1, 4, 3, 2), normal(1, 2, 3, 2), normal(1, 2, 3, 3)), "causal, grouped"),
    Sample("attention", lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, attn_mask=MASK),
           (normal(1, 2, 3, 2), normal(1, 1, 4, 2), normal(1, 1, 4, 2)), "masked"),
    Sample("dropout", lambda x: mt.exp(mt.dropout(x, 0.4, mask=MASK)), (normal(3, 4),)),
    Sample("softmax_cross_entropy", lambda z: mt.softmax_cross_entropy(z, LABELS), (normal(3, 5),)),
    Sample("linear_cross_entropy", lambda x, w: mt.linear_cross_entropy(x, w, LABELS), (normal(3, 4), normal(5, 4))),
    Sample("linear_cross_entropy", lambda x, w: mt.linear_cross_entropy(x, w, LABELS, 2), (normal(3, 4), normal(5, 4)),
           "ignoring"),
    Sample("softmax", lambda z: mt.softmax(z, 0), (normal(3, 4),)),
    Sample("log_softmax", mt.log_softmax, (normal(3, 4),)),
    Sample("logsumexp", lambda z: mt.logsumexp(z, (0, 2)), (normal(2, 3, 4),)),
    Sample("var", lambda x: mt.var(x, 0, correction=1) * mt.std(x), (normal(3, 4),)),
    Sample("mean", lambda x: mt.exp(mt.mean(x, 1, keepdims=True)), (normal(3, 4),)),
    Sample("at", lambda x, v: mt.exp(mt.ops.indexing.At(x)[1:, 2].set(v)) * x, (normal(3, 4), normal(2)), "set"),
    Sample("at", lambda x, v: mt.exp(mt.ops.indexing.At(x)[ROWS].add(v)), (normal(3, 2), normal(4, 2)), "add"),
    Sample("attention", lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, is_causal=True, documents=DOCUMENTS),
           (normal(2, 2, 5, 3), normal(2, 1, 5, 3), normal(2, 1, 5, 4)), "documents"),
    Sample("attention", lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, is_causal=True, window=2),
           (normal(1, 2, 4, 3), normal(1, 1, 4, 3), normal(1, 1, 4, 2)), "window"),
    Sample("attention", lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, documents=DOCUMENTS),
           (normal(2, 2, 5, 3), normal(2, 1, 5, 3), normal(2, 1, 5, 4)), "documents, both ways"),
    Sample("softmax_cross_entropy", lambda z: mt.softmax_cross_entropy(z, LABELS, 2), (normal(3, 5),), "ignoring"),
]

# Linear functions, for linear_transpose.
SAMPLES += [
    *(Sample(name, function, args, "linear", linear) for name, function, args, linear in (
        ("mul", mt.mul, (normal(3, 1), normal(4)), "each"), ("div", mt.div, (normal(3, 4), away_from_zero(4)), "first"),
        ("neg", mt.neg, (normal(3),), "each"), ("sub", lambda x: x[1:] - x[:-1], (normal(4, 2),), "each"),
        ("where", lambda x: mt.where(MASK, x, 0.0), (normal(3, 4),), "each"),
        ("reshape", lambda x: mt.reshape(x, (2, 6)), (normal(3, 4),), "each"),
        ("transpose", lambda x: mt.transpose(x, (2, 0, 1)), (normal(2, 3, 4),), "each"),
        ("concatenate", lambda x: mt.concatenate([x, 2.0 * x[:1], mt.zeros_like(x[:1]).data]), (normal(3, 2),), "each"),
        ("split", lambda x: (lambda a, b: mt.stack([a, b[1:]]))(*mt.split(x, [2])), (normal(5, 2),), "each"),
        ("sum", lambda x: mt.sum(x, (0, 2)), (normal(2, 3, 4),), "each"),
        ("broadcast_to", lambda x: mt.broadcast_to(x, (2, 3, 4)), (normal(3, 1),), "each"),
        ("cumsum", lambda x: mt.cumsum(x, 1), (normal(2, 4),), "each"),
        ("getitem", lambda x: x[ROWS], (normal(3, 2),), "each"),
        ("scatter_add", lambda x: mt.scatter_add(x, ROWS, (3, 2)), (normal(4, 2),), "each"),
        ("reorder", lambda x: mt.ops.indexing.reorder(x, ORDER, 1), (normal(3, 4),), "each"),
        ("matmul", mt.matmul, (normal(5, 2, 3), normal(3, 4)), "each"),
        ("grouped_matmul", lambda x, w: mt.grouped_matmul(x, w, (3, 0, 2)), (normal(5, 2), normal(3, 2, 4)), "each"),
        ("grouped_outer", lambda x, y: mt.grouped_outer(x, y, (3, 0, 2)), (normal(5, 2), normal(5, 4)), "each"),
        ("einsum", lambda x, y: mt.einsum("iij,jk->k", x, y), (normal(2, 2, 3), normal(3, 4)), "each"),
        ("tensordot", mt.tensordot, (normal(2, 3, 4), normal(3, 4, 2)), "each"),
        ("conv", lambda x, w: mt.conv2d(x, w, None, (2, 1), 1, (1, 2), 2), (normal(2, 4, 4, 5), normal(2, 2, 3, 2)),
         "each"),
        ("conv_transpose", lambda x, w: mt.conv_transpose1d(x, w, None, 2, 1), (normal(2, 3, 4), normal(3, 2, 3)),
         "each"),
        ("avg_pool", lambda x: mt.avg_pool2d(x, 2, padding=1, count_include_pad=False), (normal(1, 2, 3, 4),), "each"),
        ("windows", lambda x: mt.ops.windows.windows(x, (2,), (1,), (2,)), (normal(2, 5),), "each"),
        ("fold", lambda c: mt.ops.windows.fold(c, (6,), (3,), (2,), (1,)), (normal(2, 2, 3),), "each"),
        ("pad", lambda x: mt.pad(mt.flip(x, 0), ((1, 2), (0, 3))), (normal(2, 3),), "each"))),
]

# What is new stands last: each sample draws its numbers behind all that stand before it.
SAMPLES += [
    Sample("softmax", mt.scaled_dot_product_attention,
           (normal(2, 4, 3, 2), normal(2, 2, 4, 2), normal(2, 2, 4, 3), normal(4, 1, 4)), "of biased attention"),
    Sample("softmax", lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, BIAS, is_causal=True),
           (normal(1, 2, 3, 2), normal(1, 1, 4, 2), normal(1, 1, 4, 2)), "of biased and causal attention"),
    Sample("block_attention", lambda q, k, v: mt.block_attention(q, k, v, 2, 2),
           (normal(2, 4, 5, 3), normal(2, 2, 7, 3), normal(2, 2, 7, 4))),
    Sample("block_attention", lambda q, k, v: mt.block_attention(q, k, v, 3, 1, 0.7),
           (normal(1, 2, 8, 2), normal(1, 1, 8, 2), normal(1, 1, 8, 3)), "own blocks"),
]

def scores(x, y):
    """Of the rows of two arrays, as if they were heads."""
    return greatest_scores(*(mt.reshape(z, (1, -1, 1, z.shape[-1])) for z in (x, y)), scale=0.5)


def block_scores(x, y):
    """Of the rows of two arrays, as if they were heads; of y as many as are wanted."""
    x, y = (mt.reshape(z, (1, -1, 1, z.shape[-1])) for z in (x, y))
    times = mt.concatenate([y] * 3, 2)
    return greatest_block_scores(x, times, 1, 2, 0.5)


# They have no derivative: constants of the level below. {name: function of one array or two, of equal last axes}
CONSTANT = {name: getattr(mt, name) for name in (
    "sign", "floor", "ceil", "greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "argmax", "argmin",
    "any", "all", "isnan", "isfinite", "logical_and", "logical_or", "logical_xor", "logical_not", "floor_divide")}
CONSTANT["greatest_scores"] = scores
CONSTANT["greatest_block_scores"] = block_scores


def entries():
    """Names of the op table's entries but for those of ranks, which are listed once their modules are imported:
    parallel/test_collectives.py and test_context_parallel.py are their tests."""
    modules = {name: str(getattr(getattr(op, "definition", None) or op.forward, "__module__", None))
               for name, op in mt.OPS.items() if not name.startswith("test_")}
    return {name for name, module in modules.items() if not module.startswith("minitorch_dist.parallel.")}
