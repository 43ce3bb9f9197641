"""What the ranks do in the tests of attention in parts. What must hold is checked by the parent process."""

import contextlib
import importlib.util

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger
from minitorch_dist.comm.link import SimulatedLink, VirtualClock
from minitorch_dist.parallel import context_parallel as cp
from minitorch_dist.parallel import ring_attention as ring
from minitorch_dist.parallel.check import check_grads_across
from tests.device.fake_cupy import installed
from tests.parallel.sequence_cases import instead

HOW = cp.HOW


def values(shape, *key):
    return np.random.default_rng(list(key)).standard_normal(shape)


# ---------------------------------------------------------------- attention

def inputs(heads, kv_heads, time, size=5, out=7, dtype=np.float64):
    """q, k, v and a cotangent, of whole sequences; the batch is 3."""
    shapes = (heads, size), (kv_heads, size), (kv_heads, out), (heads, out)
    return [values((3, h, time, s), 1, i).astype(dtype) for i, (h, s) in enumerate(shapes)]


def attention(how, causal, layout, heads, kv_heads, time, times=1.0):
    """(y, dq, dk, dv) of whole sequences, on every rank, and the bytes that a rank keeps for backward. times: what the
    queries are multiplied by."""
    world = comm.world()
    *parts, u = [cp.cut_sequence(x, world, layout, axis=2) for x in inputs(heads, kv_heads, time)]
    leaves = [mt.tensor(x, requires_grad=True) for x in (parts[0] * times, *parts[1:])]
    with ledger.record(memory=True) as book:
        y = HOW[how](*leaves, world, causal, layout)
        kept = book.live["activation"]
    y.backward(mt.tensor(u))
    whole = [cp.join_sequence(x, world, layout, axis=2) for x in (y.numpy(), *(leaf.grad.numpy() for leaf in leaves))]
    return whole, kept


def derivatives():
    """Names of what check_grads_across has accepted, in reverse and in forward mode, of q, k and v together; to second
    order what has a pullback of its own."""
    world, passed = comm.world(), []
    for how, causal, layout, kv_heads, order in (("ring", True, "zigzag", 1, 2), ("ring", False, "contiguous", 1, 1),
                                                 ("all_to_all", True, "zigzag", 2, 1)):
        shapes = [(1, 2, 2, 2), (1, kv_heads, 2, 2), (1, kv_heads, 2, 1)]
        ends = np.cumsum([0, *(np.prod(shape) for shape in shapes)])

        def f(z, how=how, causal=causal, layout=layout, shapes=shapes, ends=ends):
            q, k, v = (mt.reshape(z[a:b], shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False))
            return mt.sin(HOW[how](q, k, v, world, causal, layout, 0.6))
        check_grads_across(f, values(ends[-1], 2, world.rank), world, order=order)
        passed.append((how, causal, layout))
    return passed


def dtypes():
    """{(dtype, device): (of the result and the gradients, their greatest error)} beside the numbers of float64; the GPU
    is the stand-in."""
    world, found = comm.world(), {}
    for dtype, device in (("float32", "cpu"), ("float16", "cpu"), ("float16", "cuda")):
        runs = []
        for kind in (np.float64, dtype):
            *parts, u = [cp.cut_sequence(x, world, axis=2).astype(kind) for x in inputs(4, 2, 4 * world.size,
                                                                                       dtype=dtype)]
            with installed() if device == "cuda" else contextlib.nullcontext():
                leaves = [mt.tensor(x, requires_grad=True, device=device) for x in parts]
                y = cp.ring_attention(*leaves, world, True)
                y.backward(mt.tensor(u, device=device))
                runs.append([x.cpu().numpy() for x in (y.detach(), *(leaf.grad for leaf in leaves))])
        found[dtype, device] = {x.dtype.name for x in runs[1]}, max(
            abs(a - b).max() for a, b in zip(*runs, strict=True))
    return found


def by_devices():
    """(results on the host, on the stand-in for a GPU), of both ways, in float64, where CuPy's own kernels serve."""
    host = on("cpu")
    with installed():
        return host, on("cuda")


def on(device, dtype=np.float64, hows=HOW, batch=3):
    """[y and gradients] of each way."""
    world, found = comm.world(), []
    for how in hows:
        *parts, u = [cp.cut_sequence(x[:batch], world, axis=2).astype(dtype) for x in inputs(2, len(hows),
                                                                                           4 * world.size)]
        leaves = [mt.tensor(x, requires_grad=True, device=device) for x in parts]
        y = HOW[how](*leaves, world, True)
        y.backward(mt.tensor(u, device=device))
        found += [y.detach().cpu().numpy(), *(leaf.grad.cpu().numpy() for leaf in leaves)]
    return found


def by_kernels():
    """(results on the host, by Triton's kernels in their interpreter, launches of the ring); None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from tests.kernels.harness import on_stand_in
    one = np.float32, ("ring",), 1      # they are slow
    host = on("cpu", *one)
    with on_stand_in(), ledger.record() as book:
        return host, on("cuda", *one), dict(book.launches)


def devices():
    """All of these, in one process."""
    return {"dtypes": dtypes(), "devices": by_devices(), "kernels": by_kernels()}


# ---------------------------------------------------------------- counts

def counted(how, kv_heads, layout="zigzag", causal=True):
    """{pass: ({op: (calls, bytes sent)}, block products)} of one attention along cp: batch 3, 6 heads, 8 positions on
    this rank, 5 numbers per head."""
    axis = comm.DeviceMesh(cp=-1)["cp"]
    *parts, u = [cp.cut_sequence(x, axis, layout, axis=2) for x in inputs(6, kv_heads, 8 * axis.size, 5, 5)]
    leaves = [mt.tensor(x, requires_grad=True) for x in parts]
    with ledger.record() as forward:
        y = HOW[how](*leaves, axis, causal, layout)
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
