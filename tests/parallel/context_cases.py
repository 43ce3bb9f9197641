"""What the ranks do in the tests of attention in parts. What must hold is checked by the parent process."""

import contextlib
import importlib
import importlib.util
import warnings
from unittest import mock

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger
from minitorch_dist.autodiff.ops import attention as attention_op
from minitorch_dist.comm.link import SimulatedLink, VirtualClock
from minitorch_dist.parallel.check import check_grads_across
from minitorch_dist.parallel.context import context as cp
from minitorch_dist.parallel.context import ring_attention as ring
from tests.device.fake_cupy import installed
from tests.parallel.sequence_cases import instead

HOW = cp.HOW


def values(shape, *key):
    return np.random.default_rng(list(key)).standard_normal(shape)


def among(n, target, args):
    """What `module:function` gives on the first n of these ranks, as if there were no others; None on the others."""
    module, name = target.split(":")
    world = comm.world()
    part = world.split(0 if world.rank < n else None, name="world")
    if part is None:
        return None
    with instead(comm, "world", lambda: part):
        return getattr(importlib.import_module(module), name)(*args)


# ---------------------------------------------------------------- attention

def inputs(heads, kv_heads, time, size=5, out=7, dtype=np.float64):
    """q, k, v and a cotangent, of whole sequences; the batch is 3."""
    shapes = (heads, size), (kv_heads, size), (kv_heads, out), (heads, out)
    return [values((3, h, time, s), 1, i).astype(dtype) for i, (h, s) in enumerate(shapes)]


def attention(how, causal, layout, heads, kv_heads, time, times=1.0, window=None, fewest=64):
    """(y, dq, dk, dv) of whole sequences, on every rank, and the bytes that a rank keeps for backward. times: what the
    queries are multiplied by; fewest: ops/attention.py's FEWEST."""
    world = comm.world()
    *parts, u = [cp.cut_sequence(x, world, layout, axis=2) for x in inputs(heads, kv_heads, time)]
    leaves = [mt.tensor(x, requires_grad=True) for x in (parts[0] * times, *parts[1:])]
    with instead(attention_op, "FEWEST", fewest):
        with ledger.record(memory=True) as book:
            y = HOW[how](*leaves, world, causal, layout, window=window)
            kept = book.live["activation"]
        y.backward(mt.tensor(u))
    whole = [cp.join_sequence(x, world, layout, axis=2) for x in (y.numpy(), *(leaf.grad.numpy() for leaf in leaves))]
    return whole, kept


def disagreements():
    """{(way, what the two ranks disagree about): what the MismatchError says}, each on a communicator of its own."""
    world, found = comm.world(), {}
    rank = world.rank

    def attempt(how, name, action):
        part = world.split(0, name="part")
        try:
            action(part)
            found[how, name] = None
        except comm.MismatchError as error:
            found[how, name] = str(error)

    def attend(part, how, batch=1, time=4, kv_heads=2, causal=True, layout="zigzag", scale=None, window=None):
        parts = [mt.tensor(np.ones((batch, heads, time, 3)), requires_grad=True) for heads in (2, kv_heads, kv_heads)]
        return HOW[how](*parts, part, causal, layout, scale, window=window)

    def backward_or_again(part):
        y = attend(part, "ring")
        if rank == 0:
            y.backward(mt.tensor(np.ones(y.shape)))
        else:
            attend(part, "ring")
    for how in HOW:
        changes = {"causal": {"causal": bool(rank)}, "layout": {"layout": ("zigzag", "contiguous")[rank]},
                   "shape": {"batch": 2 - rank, "time": 4 + 4 * rank}, "scale": {"scale": 1.0 + rank},
                   "window": {"window": 2 + rank}}
        for name, change in changes.items():
            attempt(how, name, lambda part, how=how, change=change: attend(part, how, **change))
    attempt("ring", "groups", lambda part: attend(part, "ring", kv_heads=2 - rank))
    attempt("ring", "way", lambda part: attend(part, list(HOW)[rank]))
    attempt("ring", "pass", backward_or_again)
    return found


def derivatives():
    """Names of what check_grads_across has accepted, in reverse and in forward mode, of q, k and v together; to second
    order what has a pullback of its own."""
    world, passed = comm.world(), []
    for how, causal, layout, kv_heads, order, window in (
            ("ring", True, "zigzag", 1, 2, None), ("ring", False, "contiguous", 1, 1, None),
            ("ring", True, "zigzag", 1, 1, 2), ("all_to_all", True, "zigzag", 2, 1, None)):
        time = len(ring.chunks(0, world.size, layout))
        shapes = [(1, 2, time, 1), (1, kv_heads, time, 1), (1, kv_heads, time, 3 - kv_heads)]
        ends = np.cumsum([0, *(np.prod(shape) for shape in shapes)])

        def f(z, how=how, causal=causal, layout=layout, shapes=shapes, ends=ends, window=window):
            q, k, v = (mt.reshape(z[a:b], shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False))
            return mt.sin(HOW[how](q, k, v, world, causal, layout, 0.6, window=window))
        check_grads_across(f, values(ends[-1], 2, world.rank), world, order=order)
        passed.append((how, causal, layout))
    return passed


@contextlib.contextmanager
def stand_in(entered):
    """That of a GPU, which leaves no warning's filter to the next call."""
    with warnings.catch_warnings(), entered():
        yield


def dtypes():
    """{(dtype, device): (of the result and the gradients, their greatest error)} beside the numbers of float64; the GPU
    is the stand-in."""
    world, found = comm.world(), {}
    for dtype, device in (("float32", "cpu"), ("float16", "cpu"), ("float16", "cuda")):
        runs = []
        for kind in (np.float64, dtype):
            *parts, u = [cp.cut_sequence(x, world, axis=2).astype(kind) for x in inputs(4, 2, 4 * world.size,
                                                                                       dtype=dtype)]
            with stand_in(installed if device == "cuda" else contextlib.nullcontext):
                leaves = [mt.tensor(x, requires_grad=True, device=device) for x in parts]
                y = cp.ring_attention(*leaves, world, True)
                y.backward(mt.tensor(u, device=device))
                runs.append([x.cpu().numpy() for x in (y.detach(), *(leaf.grad for leaf in leaves))])
        found[dtype, device] = {x.dtype.name for x in runs[1]}, max(
            abs(a - b).max() for a, b in zip(*runs, strict=True))
    found["mixed"] = mixed()
    return found


def halves():
    """Of large scores: (greatest relative error of result and gradients in float16 beside float64, bytes sent forward,
    elements of keys and values that travel)."""
    world, runs = comm.world(), []
    *parts, u = [cp.cut_sequence(x, world, axis=2).astype(np.float16) for x in inputs(4, 2, 8 * world.size)]
    parts[:2] = [x * np.float16(4) for x in parts[:2]]
    for kind in (np.float64, np.float16):
        leaves = [mt.tensor(x.astype(kind), requires_grad=True) for x in parts]
        with ledger.record() as book:
            y = cp.ring_attention(*leaves, world, True)
        y.backward(mt.tensor(u.astype(kind)))
        runs.append([x.numpy().astype(np.float64) for x in (y.detach(), *(leaf.grad for leaf in leaves))])
    errors = [np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(*runs, strict=True)]
    return max(errors), book.bytes_sent[world.name, "send"], (parts[1].size + parts[2].size) * (world.size - 1)


def too_large():
    """(whether the gradients of values, in float16, are all inf, warnings): each rank's fit, their sum doesn't."""
    world = comm.world()
    q, k, v, u = (np.full((1, heads, 2, 2), x, np.float16) for heads, x in ((2, 0), (1, 0), (1, 1), (2, 4e4)))
    v = mt.tensor(v, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cp.ring_attention(q, k, v, world).backward(mt.tensor(u))
    return bool(np.isinf(v.grad.numpy()).all()), [str(warning.message) for warning in said]


def overflowing():
    """What a row gives whose scores all overflow in one rank's keys, and nowhere else."""
    world = comm.world()
    q, k, v = (np.full((1, 1, 1, 2), x, np.float32) for x in (1e20, (1e-20, -1e20)[world.rank], world.rank + 0.5))
    return HOW["ring"](q, k, v, world, False, "contiguous")


def mixed():
    """Whether queries in float32 and keys in float64 give what scaled_dot_product_attention gives of them: float64."""
    world, found = comm.world(), []
    q, k, v, _ = inputs(2, 1, 4 * world.size)
    for attend in (mt.scaled_dot_product_attention, lambda *parts: cp.join_sequence(
            HOW["ring"](*(cp.cut_sequence(x, world, axis=2) for x in parts), world), world, axis=2)):
        found.append(attend(q.astype("f4"), k, v))
    return found[0].dtype == found[1].dtype == np.float64 and abs(found[0] - found[1]).max() < 1e-12


def by_devices():
    """(results on the host, on the stand-in for a GPU), of both ways, in float64, where CuPy's own kernels serve."""
    host = on("cpu")
    with stand_in(installed):
        return host, on("cuda")


def on(device, dtype=np.float64, hows=HOW, batch=3, documents=None):
    """[y and gradients] of each way."""
    world, found = comm.world(), []
    for how in hows:
        *parts, u = [cp.cut_sequence(x[:batch], world, axis=2).astype(dtype) for x in inputs(2, len(hows),
                                                                                           4 * world.size)]
        leaves = [mt.tensor(x, requires_grad=True, device=device) for x in parts]
        numbers = documents if documents is None else backend.to(np.array(documents), device)
        y = HOW[how](*leaves, world, True, documents=numbers)
        y.backward(mt.tensor(u, device=device))
        found += [y.detach().cpu().numpy(), *(leaf.grad.cpu().numpy() for leaf in leaves)]
    return found


def by_kernels(documents=None):
    """(results on the host, by Triton's kernels in their interpreter, launches of the ring); None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from tests.kernels.harness import on_stand_in
    one = np.float32, ("ring",), 1, documents       # they are slow
    host = on("cpu", *one)
    with stand_in(on_stand_in), ledger.record() as book, mock.patch.dict(ring.LAYOUTS, zigzag=lambda *_: (0, 1)):
        return host, on("cuda", *one), dict(book.launches)


# ---------------------------------------------------------------- counts

def counted(how, kv_heads, layout="zigzag", causal=True, window=None):
    """{pass: ({op: (calls, bytes sent)}, block products)} of one attention along cp: batch 3, 6 heads, 8 positions on
    this rank, 5 numbers per head."""
    axis = comm.DeviceMesh(cp=-1)["cp"]
    *parts, u = [cp.cut_sequence(x, axis, layout, axis=2) for x in inputs(6, kv_heads, 8 * axis.size, 5, 5)]
    leaves = [mt.tensor(x, requires_grad=True) for x in parts]
    with ledger.record() as forward:
        y = HOW[how](*leaves, axis, causal, layout, window=window)
    with ledger.record() as backward:
        y.backward(mt.tensor(u))
    return {name: ({op: (book.calls[a, op], book.bytes_sent[a, op]) for a, op in book.calls if a == "cp"},
                   book.launches["attention_block"])
            for name, book in (("forward", forward), ("backward", backward))}


def timed(block, hop):
    """(seconds forward, seconds backward, whether each block lay between the posting and the arrival of the next keys)
    on a clock that a block product moves on by `block` seconds and a message of keys and values by `hop`."""
    axis, clock = comm.DeviceMesh(cp=-1)["cp"], VirtualClock()
    *parts, u = [cp.cut_sequence(x, axis, axis=2) for x in inputs(2, 2, 4 * axis.size, 5, 5)]
    leaves = [mt.tensor(x, requires_grad=True) for x in parts]

    def slow(function):
        def run(*args):
            clock.sleep(block)
            return function(*args)
        return run
    axis.hooks.append(SimulatedLink(0.0, 2 * parts[1].nbytes / hop, clock))
    with instead(ring, "_attend", slow(ring._attend)), instead(ring, "_attend_pullback", slow(ring._attend_pullback)):
        with clock.running(), ledger.record(timeline=True) as book:
            y = HOW["ring"](*leaves, axis, False)
            forward = clock.time
            y.backward(mt.tensor(u))
    spans = [s for s in book.spans if s.begin < forward]
    blocks = [s for s in spans if s.name == "attention block"]
    hops = [s for s in spans if s.name == "irecv"]
    covered = all(h.begin <= b.begin and h.end >= b.end for h, b in zip(hops, blocks, strict=False))
    return forward, clock.time - forward, covered and len(hops) == len(blocks) - 1
