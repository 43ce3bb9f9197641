"""What the ranks do in the tests of linear attention over ranks."""

from unittest.mock import patch

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn
from minitorch_dist.nn import states
from minitorch_dist.nn.delta_rule import DELTA_RULE
from minitorch_dist.nn.states import LINEAR_ATTENTION
from minitorch_dist.parallel.context import context as cp
from minitorch_dist.parallel.context import linear_context
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .latent_cases import bytes_of, cut_block, through
from .tensor_cases import values

BATCH, HEADS, TIME, SIZE, OUT = 2, 3, 24, 4, 5
RULES = {"linear": LINEAR_ATTENTION, "delta": DELTA_RULE}


def given(kind, time=TIME):
    """q, k, v, logs, of the delta rule rates too, of whole sequences, and the cotangent; some positions forget nearly
    all."""
    logs = -values((BATCH, HEADS, time), 4) ** 2 / 4
    q, k, v = (values((BATCH, HEADS, time, size), i) for i, size in enumerate((SIZE, SIZE, OUT)))
    ct = values((BATCH, HEADS, time, OUT), 5)
    if kind == "linear":
        return q, k, v, logs, ct
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return q, k, v, logs, 1 / (1 + np.exp(-values((BATCH, HEADS, time), 6))), ct


def documents():
    """Numbers of documents, some of which begin where a part does. They come again."""
    starts = np.zeros((BATCH, TIME), int)
    starts[0, [5, 6, 12, 17]] = starts[1, [6, 20]] = 1
    return starts.cumsum(1) % 2


def whole(kind, packed):
    """(y, gradients) in one process, of stretches of 3 positions."""
    return run(kind, packed, lambda rows, *parts: RULES[kind].attention(*parts, rows))


def run(kind, packed, attend, cut=lambda x: x, join=lambda x: x):
    *inputs, ct = given(kind)
    with patch.object(states, "SHORTEST", 3):
        parts = [mt.tensor(cut(x), requires_grad=True) for x in inputs]
        y = attend(documents() if packed else None, *parts)
        y.backward(mt.tensor(cut(ct)))
    return join(y.numpy()), [join(x.grad.numpy()) for x in parts]


def divided(kind, layout, packed, rule=None):
    """The same of ranks that have parts."""
    world, rule = comm.world(), rule or RULES[kind]
    return run(kind, packed, lambda rows, *parts: linear_context.attention(rule, parts, world, layout, rows),
               lambda x: cp.cut_sequence(x, world, layout, 2), lambda x: cp.join_sequence(x, world, layout, 2))


def _with(kind, before):
    """Its rule, with another `before`, which is told the right one."""
    return RULES[kind]._replace(before=lambda *given: before(RULES[kind].before, *given))


def _all_is_kept(before, states_, kept, ends=None):
    """A part forgets nothing of what came before it."""
    return before(states_, kept * 0.0 + (np.eye(SIZE) if len(kept.shape) == 5 else 0.0), ends)


WRONG = {       # name: what stands there instead of a rule's `before`
    "the state behind": lambda before, states_, kept, ends=None: states_,
    "nothing is forgotten between parts": _all_is_kept,
    "nothing is left between parts": lambda before, states_, kept, ends=None: before(
        states_, kept * 0.0 - (0.0 if len(kept.shape) == 5 else np.inf), ends),
}
PATCHED = {     # name: (attribute of linear_context, what stands there instead)
    "a document begins with the part": ("_numbers", lambda rows, start, time: rows[:, start:][:, [0, *range(time)]]),
    "ranks in their order": ("inverse", lambda order: range(len(order))),
}


def divided_wrongly(kind):
    """{what is wrong: y} of packed rows in a zigzag."""
    found = {name: divided(kind, "zigzag", True, _with(kind, before))[0] for name, before in WRONG.items()}
    for name, change in PATCHED.items():
        with patch.object(linear_context, *change):
            found[name] = divided(kind, "zigzag", True)[0]
    if kind == "linear":        # by the delta rule it is in what is kept
        found["states of other documents"] = divided(kind, "zigzag", True, _with(
            kind, lambda before, states_, kept, ends=None: before(states_, kept)))[0]
    return found


def sent(kind, layout, time):
    """{pass: {op: (calls, bytes sent)}} of attention of `time` positions."""
    world, found = comm.world(), {}
    *parts, ct = (mt.tensor(cp.cut_sequence(x, world, layout, 2), requires_grad=True) for x in given(kind, time))
    with ledger.record() as book:
        y = linear_context.attention(RULES[kind], parts, world, layout)
    found["forward"] = {op: (book.calls[key], book.bytes_sent[key]) for key in book.calls for op in key[1:]}
    with ledger.record() as book:
        y.backward(ct.detach())
    found["backward"] = {op: (book.calls[key], book.bytes_sent[key]) for key in book.calls for op in key[1:]}
    return found


def through_block(kind, window):
    """(y, dx, gradients), all of them whole."""
    return through(kind, *cut_block(kind, window=window, qk_norm=True))


def counted(kind, window):
    """{pass: {op: (calls, bytes sent)}} along tp of one block."""
    return bytes_of(kind, *cut_block(kind, window=window, bias=False, norm="rms"))


def written(window):
    """(what the whole model writes, what the cut one does, bytes that each cache keeps)."""
    def gpt():
        mt.manual_seed(5)
        model = nn.GPT(13, 9, 2, 4, 16, dtype=np.float64, window=window)
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
            linear_context.attention(LINEAR_ATTENTION, [x[:, :, :time] for x in given("linear")[:4]], world, "zigzag",
                                     rows)
        except ValueError as error:
            found.append(str(error))
    return found
