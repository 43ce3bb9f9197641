"""Mixed precision: products in 16 bits, whatever 16 bits are too few for in float32.

    with mt.autocast("bfloat16"):
        loss = nn.cross_entropy(model(x), labels)       # the model's parameters stay float32
    loss.backward()                                     # and so do their gradients

16 bits are half the memory, and on GPUs several times the speed in products. bfloat16 has 8 bits of precision and
float32's range; float16 has 11, and ends at 65,504 above and at 2⁻²⁴ below. Each op of the table has its class, below:
an op is one decision, taken where all ops pass, in `bind`. Whatever it is made of then runs in the precision that it
was given, and so does its backward.

    x f32 ──cast──┐
                  linear ── y f16 ── relu ── f16 ── … ── logits f16 ──cast── cross-entropy ── loss f32
    W f32 ──cast──┘    backward: the cotangents between are f16; a cast's transpose brings W's gradient back to f32

In float16 gradients below 2⁻²⁴ would become 0: optim.GradScaler moves them up. bfloat16 needs none. The classes are
torch.autocast's for CUDA.
Sources: Micikevicius et al. 2018, "Mixed precision training"; Kalamkar et al. 2019, "A study of BFLOAT16 for deep
learning training".
"""

import weakref
from contextlib import contextmanager
from typing import NamedTuple

from ..backend import as_dtype, is_array, is_short, recording, xp
from .ops.elementwise import astype
from .primitive import GENERAL, OPS, bind, mode, state
from .saved import note_cast
from .tensor import Tensor, attach
from .writes import log, tick

LOWER, FLOAT32, AS_GIVEN = "16 bits", "float32", "as given"
CLASSES = {
    # Products: their sums are added up in float32, and rounded once.
    LOWER: "matmul linear linear_gelu conv einsum grouped_matmul grouped_outer attention ring_attention "
           "block_attention all_gather_matmul matmul_reduce_scatter linear_cross_entropy",
    # What leaves float16's range, or needs more than 11 bits. What ranks add up is added in float32 as well, forward
    # and backward.
    FLOAT32: "power exp expm1 log log1p rsqrt square sum cumsum prod softmax log_softmax softmax_cross_entropy "
             "layer_norm rms_norm batch_norm copy_to reduce_from all_gather reduce_scatter broadcast reduce",
    # All others take what comes; where operands differ the wider one decides, as ever.
    AS_GIVEN: "add sub mul div neg mod maximum minimum sqrt sin cos tanh abs sign floor ceil isnan isfinite sigmoid "
              "relu erf greater greater_equal less less_equal equal not_equal logical_and logical_or logical_xor "
              "logical_not floor_divide where astype reshape transpose split pick concatenate getitem scatter_add "
              "reorder sort broadcast_to max min argmax argmin any all gelu swiglu windows fold to_device max_pool "
              "avg_pool scatter_to gather_from all_to_all greatest_scores ring_greatest_scores "
              "greatest_block_scores with_earlier recalled handed_on",
}
CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names.split()}
DTYPES = ("float16", "bfloat16")        # that autocast knows


@contextmanager
def autocast(dtype="float16", enabled=True):
    """Inside, ops run in the precision of their class (print(autocast_table())); also a decorator.

    dtype    the 16 bits: "float16" or "bfloat16"
    enabled  False: inside, ops take what comes again

    float32 parameters stay as they are, and get float32 gradients; each is cast once, and again after a backward, and
    when it has been written (an optimizer's step; a write by hand that no backward precedes wants mt.wrote). float64 is
    never cast, nor is what it meets in a product. Call backward() inside or outside: it runs in forward's precision. A
    loss is float32, which GradScaler needs. ValueError for a dtype that isn't one of these.
    """
    if (name := getattr(dtype, "__name__", None) or str(dtype)) not in DTYPES:
        raise ValueError(f"autocast: dtype {name!r}; use {' or '.join(map(repr, DTYPES))}")
    outer = state.autocast
    with mode(autocast=Region(as_dtype(name), outer.casts if outer else {}) if enabled else None):
        yield


def lowered(x):
    """x as products get it here: in autocast's 16 bits if it is on and x is float32, or other 16 bits; else as it is.
    For functions with a rule by hand, which run as given."""
    return x if state.autocast is None else state.autocast.lowered(x)


def autocast_table():
    """The op table by autocast's classes, as text. Ops that aren't the library's own are run as given."""
    kinds = {kind: [] for kind in CLASSES}
    for name in OPS:
        kinds[CLASS_OF.get(name, AS_GIVEN)].append(name)
    return "\n".join(f"{kind:8}  {' '.join(names)}" for kind, names in kinds.items())


class Cast(NamedTuple):
    """A parameter's values in 16 bits, as they were at a date. The parameter's array itself is not kept alive."""

    array: object       # weak reference
    low: object
    date: int


class Region:
    """What autocast has chosen: the 16 bits, and what parameters were in them, {(id of a leaf, dtype): Cast}."""

    __slots__ = ("dtype", "casts")

    def __init__(self, dtype, casts):
        self.dtype, self.casts = dtype, casts

    def anew(self):
        """The same for a second run, which keeps nothing beyond it."""
        return Region(self.dtype, {})

    def bind(self, primitive, args, params):
        """primitive.bind of the arguments in the precision of the op's class."""
        state.autocast = None       # the op is what it is made of: no further choices
        try:
            kind = CLASS_OF.get(primitive.name, AS_GIVEN)
            if kind is LOWER and not any(getattr(a, "dtype", None) == xp.float64 for a in args):
                args = [self.lowered(a) for a in args]
            elif kind is FLOAT32:
                args = [astype(a, xp.float32) if hasattr(a, "dtype") and is_short(a.dtype) else a for a in args]
            return bind(primitive, args, params)
        finally:
            state.autocast, state.special = self, GENERAL   # the latter, for a `mode` inside has worked it out anew

    def lowered(self, x):
        """x in 16 bits, if it is float32 (or other 16 bits)."""
        dtype = getattr(x, "dtype", None)
        if dtype is None or dtype == self.dtype or not (dtype == xp.float32 or is_short(dtype)):
            return x
        # A capture finds equal casts by itself, a graph must make its own at every run, and who packs what is saved
        # (fully_shard's gathered values, offloading) decides what stays alive.
        leaf = x.__class__ is Tensor and x.is_leaf and x.node is not None and is_array(x.data)
        if not leaf or recording.graph or state.pack:
            low = astype(x, self.dtype)
            if leaf and state.pack and x.ndim:
                note_cast(low.data, x.data)
            return low
        array, key = x.data, (id(x.node), self.dtype)
        cast = self.casts.get(key)
        if cast is None or cast.array() is not array or log.newest > cast.date and log.since(array, cast.date):
            cast = self.casts[key] = Cast(weakref.ref(array), astype(array, self.dtype), tick())
        # A node of its own for each use: gradients add up in float32, and no use frees another's.
        return attach(OPS["astype"], [x.node], [array], (array.dtype, self.dtype), cast.low, None, 0)
