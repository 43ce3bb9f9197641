"""Adam and AdamW: the whole update of the whole model in one launch.

With g the gradient (unscaled, its sign turned to maximize, plus weight_decay · p where decay is L2):

    p ← p - lr · weight_decay · p                   decoupled decay (AdamW)
    m ← β₁ m + (1 - β₁) g
    v ← β₂ v + (1 - β₂) g²
    v̂ ← v, or the largest v so far (amsgrad)
    p ← p - lr / (1 - β₁ᵗ) · m / (√v̂ / √(1 - β₂ᵗ) + eps)

What is saved: one pass instead of twelve. It reads p, g, m, v and writes p, m, v: 28 bytes per float32 parameter (36
with amsgrad, 30 for a bfloat16 parameter and gradient with a float32 master weight), where separate operations move
some 130. With state of 8 bits it is 17 bytes: m and v are unpacked, updated and packed again in registers (packing.py).
A small model's step is nothing but launches, so there is one for all parameters, of any number of flat buffers and
groups. Three tables on the device make that possible:

    work      row i: what program i does    addresses of p, master, g, m, v, v̂ | elements | parameter      int64
                                            and where state has 8 bits of the scales of m, v, v̂
    settings  row k: parameter k's group    lr 1-β₁ 1-β₂ ln β₁ ln β₂ eps decay, whether it has a gradient  float32
    steps     row k: how often parameter k has been updated                                              int32

A program works on up to BLOCK elements of one parameter, so that decay or no decay, and a parameter that rests because
it has no gradient, are matters of its row in `settings`. The work table never changes; settings are sent when they do.
Steps are counted on the device, so that a step that is skipped because of an infinite gradient (found_inf) isn't
counted, without the host being asked. Program 0 counts; it writes to a second table, for others may still read the
first, and the host swaps the two after each launch.

Arithmetic, settings and order are torch's (Adam and AdamW with fused=True), but that the gradient stays scaled.
Sources: Kingma & Ba 2015; Loshchilov & Hutter 2019; Reddi et al. 2018 (amsgrad).
"""

import math

import numpy as np
import triton
import triton.language as tl

from ..backend import device_of, to
from .kernel import Kernel
from .launch import TYPES
from .packing import CODES, SHARED, pack, unpack

TINY = float(np.finfo(np.float32).tiny)     # in eps' place where that is 0: lost beside any root, but padding isn't 0/0
ALIGN = 16      # elements: what each parameter's stretch of a flat buffer is a multiple of
COLUMNS = ("p", "master", "g", "m", "v", "largest", "elements", "parameter",        # of the work table
           "m_scales", "v_scales", "largest_scales")        # of packed state: those of column k in column k + 5


@triton.jit
def _corrections(t, log_beta):
    """1 - βᵗ = -expm1(t·ln β) to the last bits: where βᵗ is near 1 the difference would keep few digits."""
    x = t * log_beta
    series = -x * (1 + x * (1 / 2) * (1 + x * (1 / 3) * (1 + x * (1 / 4) * (1 + x * (1 / 5) * (1 + x * (1 / 6) * (
        1 + x * (1 / 7)))))))
    return tl.where(x > -0.5, series, 1 - tl.exp(x))


@triton.jit
def _state(row, column: tl.constexpr, places, levels):
    """Pointers to a program's elements of m, v or v̂ and, where these have 8 bits, to the scales of their blocks."""
    if levels is None:
        at = tl.multiple_of(tl.load(row + column).to(tl.pointer_type(tl.float32)), 16) + places
        return at, at
    else:
        at = tl.multiple_of(tl.load(row + column).to(tl.pointer_type(tl.uint8)), 16) + places
        return at, tl.load(row + column + 5).to(tl.pointer_type(tl.float32)) + tl.arange(0, places.shape[0] // SHARED)


@triton.jit
def _load(at, scales_at, elements, inside, levels):
    """What they point to: float32 numbers, or codes and scales."""
    if levels is None:
        x = tl.load(at, mask=inside, other=0.0)
        return x, x
    else:
        blocks = tl.arange(0, inside.shape[0] // SHARED) < elements // SHARED
        return tl.load(at, mask=inside, other=0), tl.load(scales_at, mask=blocks, other=0.0)


@triton.jit
def _store(at, scales_at, elements, inside, levels, x, SIGNED: tl.constexpr):
    """Put float32 numbers there."""
    if levels is None:
        tl.store(at, x, mask=inside)
    else:
        codes, scales = pack(x, SIGNED)
        tl.store(at, codes, mask=inside)
        tl.store(scales_at, scales, mask=tl.arange(0, inside.shape[0] // SHARED) < elements // SHARED)


@triton.jit
def _adam(work, settings, steps, counted, grad_scale, found_inf, levels, parameters,
          PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, MASTER: tl.constexpr, DECOUPLED: tl.constexpr,
          AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, COUNTERS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = work + program.to(tl.int64) * (8 if levels is None else 11)
    who = tl.load(row + 7)
    mine = settings + who * 8
    lr, share1, share2 = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2)
    log_beta1, log_beta2 = tl.load(mine + 3), tl.load(mine + 4)
    eps, decay, active = tl.load(mine + 5), tl.load(mine + 6), tl.load(mine + 7)
    skipped = 0.0
    if found_inf is not None:
        skipped = tl.load(found_inf)
    t = (tl.load(steps + who) + 1).to(tl.float32)

    if program == 0:
        for first in tl.static_range(0, COUNTERS, 1024):
            k = first + tl.arange(0, 1024)
            counts = k < parameters
            goes_on = tl.load(settings + k * 8 + 7, mask=counts, other=0.0) * tl.where(skipped == 0.0, 1.0, 0.0)
            tl.store(counted + k, tl.load(steps + k, mask=counts, other=0) + goes_on.to(tl.int32), mask=counts)

    # The loads are 128 bits wide because these are known to be multiples of 16.
    elements = tl.multiple_of(tl.load(row + 6).to(tl.int32), 16)
    elements = tl.multiple_of(tl.where(active * tl.where(skipped == 0.0, 1.0, 0.0) > 0.0, elements, 0), 16)
    places = tl.arange(0, BLOCK)
    inside = places < elements
    p_at = tl.multiple_of(tl.load(row).to(tl.pointer_type(PARAMETER)), 16) + places
    g_at = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(GRADIENT)), 16) + places
    m_at, m_scales_at = _state(row, 3, places, levels)
    v_at, v_scales_at = _state(row, 4, places, levels)
    exact_at = p_at
    if MASTER:
        exact_at = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16) + places

    p = tl.load(exact_at, mask=inside, other=0.0)
    if MASTER:      # a parameter that somebody has set since the last step counts as set
        low = tl.load(p_at, mask=inside, other=0.0)
        p = tl.where(p.to(PARAMETER) == low, p, low.to(tl.float32))
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32)
    m, m_scales = _load(m_at, m_scales_at, elements, inside, levels)
    v, v_scales = _load(v_at, v_scales_at, elements, inside, levels)
    if AMSGRAD:
        largest_at, largest_scales_at = _state(row, 5, places, levels)
        largest, largest_scales = _load(largest_at, largest_scales_at, elements, inside, levels)
    if levels is not None:
        tl.debug_barrier()      # no load passes it: else those of p and g would be begun when the codes are there
        m, v = unpack(m, m_scales, levels), unpack(v, v_scales, levels + CODES)
        if AMSGRAD:
            largest = unpack(largest, largest_scales, levels + CODES)
    if grad_scale is not None:
        g = g * tl.div_rn(1.0, tl.load(grad_scale))
    if MAXIMIZE:
        g = -g
    if DECOUPLED:
        p = p - lr * decay * p
    else:
        g = g + decay * p
    m = m + share1 * (g - m)
    v = v + share2 * (g * g - v)
    if AMSGRAD:
        largest = tl.maximum(v, largest, propagate_nan=tl.PropagateNan.ALL)
        _store(largest_at, largest_scales_at, elements, inside, levels, largest, False)
    else:
        largest = v
    unbias = tl.div_rn(1.0, tl.sqrt_rn(_corrections(t, log_beta2)))
    p = p - tl.div_rn(lr, _corrections(t, log_beta1)) * tl.div_rn(m, tl.sqrt_rn(largest) * unbias + eps)
    tl.store(exact_at, p, mask=inside)
    _store(m_at, m_scales_at, elements, inside, levels, m, True)
    _store(v_at, v_scales_at, elements, inside, levels, v, False)
    if MASTER:
        tl.store(p_at, p.to(PARAMETER), mask=inside)


def definition(p, g, m, v, largest, t, lr, betas, eps, decay, decoupled=False, maximize=False, grad_scale=1.0):
    """Update t (from 1) of one parameter in NumPy: the new (p, m, v, largest); largest is None without amsgrad."""
    g = -g / grad_scale if maximize else g / grad_scale
    if decoupled:
        p = p - lr * decay * p
    else:
        g = g + decay * p
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    if largest is not None:
        largest = np.maximum(largest, v)
    correction1, correction2 = 1 - betas[0] ** t, 1 - betas[1] ** t
    denominator = np.sqrt(v if largest is None else largest) / math.sqrt(correction2) + eps
    return p - lr / correction1 * m / denominator, m, v, largest


ADAM = Kernel(
    "adam", _adam,
    {"work": "*i64", "settings": "*fp32", "steps": "*i32", "counted": "*i32", "grad_scale": "*fp32",
     "found_inf": "*fp32", "levels": "*fp32", "parameters": "i32"},
    {"PARAMETER": tl.float32, "GRADIENT": tl.float32, "MASTER": False, "DECOUPLED": False, "AMSGRAD": False,
     "MAXIMIZE": False, "COUNTERS": 1024, "BLOCK": 2048}, num_warps=8,
    examples=({"levels": None, "DECOUPLED": True, "grad_scale": None, "found_inf": None}, {"levels": None},
              {"levels": None, "AMSGRAD": True, "MAXIMIZE": True, "COUNTERS": 2048},
              {"levels": None, "PARAMETER": tl.bfloat16, "GRADIENT": tl.bfloat16, "MASTER": True, "DECOUPLED": True},
              {"levels": None, "PARAMETER": tl.float16, "MASTER": True, "AMSGRAD": True},
              {"DECOUPLED": True, "grad_scale": None, "found_inf": None}, {"AMSGRAD": True},
              {"PARAMETER": tl.bfloat16, "GRADIENT": tl.bfloat16, "MASTER": True, "DECOUPLED": True}))
KERNELS = (ADAM,)


class Update:
    """The tables of one model's update, and its launch.

    parameters  per parameter a dict of 1-d arrays of one length, a multiple of 16 elements, and each at a multiple of
                16 bytes: "p", "g", "m", "v", and where asked for "master" (float32, of a p in 16 bits) and "largest"
                (amsgrad). The update is in place
    steps       per parameter how often it has been updated
    levels      float32 (512,) on the device: what the codes of m mean, and behind these what those of v and largest do.
                Then m, v and largest are codes, and "m_scales", "v_scales", "largest_scales", a 16th as long, stand
                beside them (optim/packed.py)

    All p must have one dtype, all g one dtype (float32, or p's own 16 bits); all else is float32, but for codes.
    """

    def __init__(self, parameters, steps, decoupled=False, amsgrad=False, maximize=False, levels=None):
        first = parameters[0]
        self.device, self.levels = device_of(first["p"]), levels
        self.count = len(parameters)
        check_arrays(parameters, ("m", "v", "largest") if amsgrad else ("m", "v"), levels is not None)
        self.options = {"PARAMETER": element(first["p"]), "GRADIENT": element(first["g"]), "MASTER": "master" in first,
                        "DECOUPLED": decoupled, "AMSGRAD": amsgrad, "MAXIMIZE": maximize,
                        "COUNTERS": -(-self.count // 1024) * 1024}
        self.held = parameters      # the work table holds addresses alone
        self.work = to(work_table(parameters), self.device)
        self.steps = [to(np.array(steps, np.int32), self.device) for _ in range(2)]
        self.settings = self.sent = None

    def __call__(self, settings, grad_scale=None, found_inf=None):
        """Update every parameter, in one launch.

        settings    per parameter (lr, betas, eps, weight_decay), or None where it has no gradient and rests
        grad_scale  gradients are divided by it: float32 array of one element on the device, or None
        found_inf   where it isn't 0, nothing is changed and no step counted: the same
        """
        if settings != self.sent:
            self.settings, self.sent = to(settings_table(settings), self.device), settings
        before, after = self.steps
        ADAM((len(self.work),), self.work, self.settings, before, after, grad_scale, found_inf, self.levels, self.count,
             **self.options)
        self.steps = [after, before]

    def counts(self):
        """Per parameter how often it has been updated. On a GPU this waits for it."""
        return to(self.steps[0], "cpu").tolist()


def number(x, like):
    """A float32 array of one element on `like`'s device, as the launch wants grad_scale and found_inf."""
    array = x.astype(np.float32).reshape(1) if hasattr(x, "astype") else np.array([x], np.float32)
    return to(array, device_of(like))


def element(array):
    """Triton's type of an array's elements."""
    return {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}[TYPES[array.dtype.name]]


def check_arrays(parameters, state, packed):
    """ValueError unless each parameter has the same arrays, those that are needed; TypeError where a dtype is wrong."""
    first = parameters[0]
    dtypes = {name: first[name].dtype.name for name in ("p", "g")}
    dtypes |= {"master": "float32"} if "master" in first else {}
    dtypes |= dict.fromkeys(state, "uint8" if packed else "float32")
    dtypes |= {f"{name}_scales": "float32" for name in state if packed}
    for k, arrays in enumerate(parameters):
        if set(arrays) != set(dtypes):
            raise ValueError(f"adam: parameter {k} has the arrays {', '.join(sorted(arrays))}; it needs "
                             f"{', '.join(sorted(dtypes))}")
    for name, dtype in dtypes.items():
        if wrong := {arrays[name].dtype.name for arrays in parameters} - {dtype}:
            raise TypeError(f"adam: {name} of dtype {', '.join(sorted(wrong))}; in one update all are {dtype}")


def address(array, multiple=16):
    """Where an array's memory begins; ValueError unless that is a multiple of so many bytes."""
    at = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    if at % multiple:
        raise ValueError(f"adam: an array at address {at:#x}; it must begin at a multiple of {multiple} bytes")
    return at


def work_table(parameters):
    """int64 (programs, 8), or 11 where state is packed: who works on what. Each program has up to BLOCK elements of one
    parameter."""
    block = ADAM.constexprs["BLOCK"]
    names = COLUMNS if "m_scales" in parameters[0] else COLUMNS[:8]
    rows = []
    for k, arrays in enumerate(parameters):
        size = arrays["p"].size
        starts = np.arange(0, max(size, 1), block)      # a parameter without elements has a program too: it is counted
        part = np.zeros((len(starts), len(names)), np.int64)
        for name, a in arrays.items():
            share = SHARED.value if name.endswith("_scales") else 1
            if a.shape != (size // share,) or size % ALIGN or not a.flags.c_contiguous:
                raise ValueError(f"adam: parameter {k}: {name} has shape {a.shape} and strides {a.strides}; all must "
                                 f"be contiguous, of one length, a multiple of {ALIGN} elements, and scales a "
                                 f"{SHARED.value}th of that")
            at = address(a, 16 if share == 1 else a.itemsize)
            part[:, names.index(name)] = at + starts // share * a.itemsize
        part[:, 6], part[:, 7] = np.minimum(size - starts, block), k
        rows.append(part)
    return np.concatenate(rows)


def settings_table(settings):
    """float32 (parameters, 8) of what each parameter's group says."""
    rows = {None: (0.0, 0.0, 0.0, -1.0, -1.0, 1.0, 0.0, 0.0)}      # of one that rests: nothing is divided by 0
    for given in set(settings) - {None}:
        lr, (beta1, beta2), eps, decay = given
        rows[given] = lr, 1 - beta1, 1 - beta2, log(beta1), log(beta2), max(eps, TINY), decay, 1.0
    return np.array([rows[given] for given in settings], np.float32)


def log(beta):
    """ln β, and -inf for β = 0: then βᵗ is 0."""
    return math.log(beta) if beta > 0 else -math.inf
