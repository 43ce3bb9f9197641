"""What the ranks do in the tests of linear attention over ranks."""

from unittest.mock import patch

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn
from minitorch_dist.nn import states
from minitorch_dist.parallel import context_parallel as cp
from minitorch_dist.parallel import linear_context
from minitorch_dist.parallel import tensor_parallel as tp

from .latent_cases import bytes_of, cut_block, through
from .tensor_cases import values

BATCH, HEADS, TIME, SIZE, OUT = 2, 3, 24, 4, 5


def given(time=TIME):
    """q, k, v, logs of whole sequences, and the cotangent; some positions forget nearly all."""
    logs = -values((BATCH, HEADS, time), 4) ** 2 / 4
    return (*(values((BATCH, HEADS, time, size), i) for i, size in enumerate((SIZE, SIZE, OUT))), logs,
            values((BATCH, HEADS, time, OUT), 5))


def documents():
    """Numbers of documents, some of which begin where a part does. They come again."""
    starts = np.zeros((BATCH, TIME), int)
    starts[0, [5, 6, 12, 17]] = starts[1, [6, 20]] = 1
    return starts.cumsum(1) % 2


def whole(packed):
    """(y, gradients) in one process, of stretches of 3 positions."""
    return run(packed, lambda rows, *parts: states.linear_attention(*parts, rows))


def run(packed, attend, cut=lambda x: x, join=lambda x: x):
    *inputs, ct = given()
    with patch.object(states, "SHORTEST", 3):
        parts = [mt.tensor(cut(x), requires_grad=True) for x in inputs]
        y = attend(documents() if packed else None, *parts)
        y.backward(mt.tensor(cut(ct)))
    return join(y.numpy()), [join(x.grad.numpy()) for x in parts]


def divided(layout, packed):
    """The same of ranks that have parts."""
    world = comm.world()
    return run(packed, lambda rows, *parts: linear_context.linear_attention(*parts, world, layout, rows),
               lambda x: cp.cut_sequence(x, world, layout, 2), lambda x: cp.join_sequence(x, world, layout, 2))


def _from_nothing(states_, logs, ends=None):
    """What stands before a part is what it leaves itself."""
    found, kept = states.carried(states_, logs, ends)
    return found[:, :, 1:], kept


def _all_is_kept(states_, logs, ends=None):
    """A part forgets nothing of what came before it."""
    return states.carried(states_, logs * 0.0, ends)


def _across_documents(states_, logs, ends=None):
    return states.carried(states_, logs)


WRONG = {       # name: (attribute of linear_context, what stands there instead)
    "the state behind": ("carried", _from_nothing), "nothing is forgotten between parts": ("carried", _all_is_kept),
    "states of other documents": ("carried", _across_documents),
    "a document begins with the part": ("_numbers", lambda rows, start, time: rows[:, start:][:, [0, *range(time)]]),
    "ranks in their order": ("inverse", lambda order: range(len(order))),
}


def divided_wrongly():
    """{what is wrong: y} of packed rows in a zigzag."""
    found = {}
    for name, change in WRONG.items():
        with patch.object(linear_context, *change):
            found[name] = divided("zigzag", True)[0]
    return found


def sent(layout, time):
    """{pass: {op: (calls, bytes sent)}} of attention of `time` positions."""
    world, found = comm.world(), {}
    *parts, ct = (mt.tensor(cp.cut_sequence(x, world, layout, 2), requires_grad=True) for x in given(time))
    with ledger.record() as book:
        y = linear_context.linear_attention(*parts, world, layout)
    found["forward"] = {op: (book.calls[key], book.bytes_sent[key]) for key in book.calls for op in key[1:]}
    with ledger.record() as book:
        y.backward(ct.detach())
    found["backward"] = {op: (book.calls[key], book.bytes_sent[key]) for key in book.calls for op in key[1:]}
    return found


def through_block(kind):
    """(y, dx, gradients), all of them whole."""
    return through(kind, *cut_block(kind, window="linear", qk_norm=True))


def counted(kind):
    """{pass: {op: (calls, bytes sent)}} along tp of one block."""
    return bytes_of(kind, *cut_block(kind, window="linear", bias=False, norm="rms"))


def written():
    """(what the whole model writes, what the cut one does, bytes that each cache keeps)."""
    def gpt():
        mt.manual_seed(5)
        model = nn.GPT(13, 9, 2, 4, 16, dtype=np.float64, window="linear")
        for p in model.parameters():
            p.data *= 4
        return model.eval()
    whole, model = gpt(), gpt()
    tp.parallelize_module(model, comm.DeviceMesh(tp=-1)["tp"], tp.plan_of(model))
    start = np.random.default_rng(8).integers(0, 13, (3, 4))
    kept = [nn.decoding.KeyValueCache(m) for m in (whole, model)]
    for cache in kept:
        cache.read(start)
    return [m.generate(start, 5, 0, cache=True) for m in (whole, model)], [cache.nbytes for cache in kept], \
        str(model.blocks[0].attention.decay)


def errors():
    """What is said where the parts don't fit, and where documents are those of a rank's part alone."""
    found, world = [], comm.world()
    for time, rows in ((3, None), (TIME // world.size, documents()[:, :TIME // world.size])):
        try:
            linear_context.linear_attention(*(x[:, :, :time] for x in given()[:4]), world, "zigzag", rows)
        except ValueError as error:
            found.append(str(error))
    return found
