"""What the ranks do in the tests of attention to a memory whose heads are divided."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger, nn
from minitorch_dist.nn.decoding import KeyValueCache, by_position
from minitorch_dist.parallel.sharding import annotate
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .sequence_cases import whole_gradients
from .tensor_cases import values

BATCH, TIME, SOURCES, DIM, HEADS = 2, 6, 5, 24, 8
PADDED = np.arange(SOURCES) < np.array([[5], [3]])[:, None, None]


def block(cut, **options):
    """(a decoder's block with biases, the axis over which it is cut, or isn't)."""
    mt.manual_seed(3)
    kv_heads = None if "latent" in options else 4
    model, axis = nn.TransformerBlock(DIM, HEADS, kv_heads, True, dtype=np.float64, std=0.3, cross=True,
                                      **options), comm.DeviceMesh(tp=-1)["tp"]
    with mt.no_grad():
        for i, p in enumerate(model.parameters()):
            if len(p.shape) == 1:
                p[...] = 1 + values(p.shape, 40, i) / 2
    if cut:
        tp.parallelize_module(model, axis, tp.plan_of(model))
    return model, axis


KINDS = {"norms": {"qk_norm": True}, "dropout": {"attention_dropout": 0.4}, "latents, dropout": {
    "latent": {"kv_rank": 7, "rope_size": 2}, "rotary": True, "attention_dropout": 0.4, "dropout": 0.1}}


def through_block(cut, kind):
    """(y, gradients of x and memory, of the parameters), all of them whole."""
    model, _ = block(cut, **KINDS[kind])
    x, memory = (mt.tensor(values((BATCH, n, DIM), n), requires_grad=True) for n in (TIME, SOURCES))
    with backend.random_scope(4, 2, BATCH, (0, BATCH)):
        y = model(x, None, memory, PADDED)
    y.backward(mt.tensor(values(y.shape, 8)))
    return y.numpy(), [x.grad.numpy(), memory.grad.numpy()], whole_gradients(model)


def counted(annotated):
    """{pass: {op: (calls, bytes sent)}} of one block that is cut, as tensor parallelism or as annotations do it."""
    model, _ = block(not annotated, bias=False, norm="rms")
    given = [values((BATCH, n, DIM), n) for n in (TIME, SOURCES)]
    if annotated:
        mesh = comm.DeviceMesh(tp=-1)
        model = annotate.shard_parameters(model, mesh, annotate.megatron(model))
        x, memory = (annotate.replicate(each, mesh).requires_grad_() for each in given)
    else:
        x, memory = (mt.tensor(each, requires_grad=True) for each in given)
    with ledger.record() as forward:
        y = model(x, None, memory, PADDED)
        y = y.settle() if annotated else y
    with ledger.record() as backward:
        y.backward(values(y.shape, 10) if annotated else mt.tensor(values(y.shape, 10)))
    found = {name: {op: (book.calls[key], book.bytes_sent[key]) for key in book.calls for op in key[1:]}
             for name, book in (("forward", forward), ("backward", backward))}
    return found, (y.full() if annotated else y).numpy()


class Decoder(nn.Module):
    """A block that reads tokens."""

    def __init__(self, cut):
        super().__init__()
        mt.manual_seed(7)
        self.embed, (self.block, _) = nn.Embedding(9, DIM, np.float64), block(cut)

    @by_position
    def forward(self, tokens, memory):
        return self.block(self.embed(tokens), None, memory)


def read():
    """(what a whole decoder gives, a cut one with a cache, the cache's bytes)."""
    memory, tokens = mt.tensor(values((BATCH, SOURCES, DIM), 1)), np.random.default_rng(8).integers(0, 9, (BATCH, TIME))
    whole, model = Decoder(False).eval(), Decoder(True).eval()
    cache = KeyValueCache(model, TIME)
    parts = [cache.read(part, memory).numpy() for part in (tokens[:, :4], tokens[:, 4:])]
    return whole(tokens, memory).numpy(), np.concatenate(parts, 1), cache.nbytes


def refused():
    """What sequence parallelism says of a memory, and tensor parallelism of a dropout of one's own."""
    found, noisy = [], nn.TransformerBlock(8, 2, attention_dropout=0.1)
    noisy.attention.dropout = type("Noisy", (nn.Dropout,), {})(0.5)
    for model, sequence_parallel in ((block(False)[0], True), (noisy, False)):
        try:
            tp.parallelize_module(model, comm.world(), tp.plan_of(model), sequence_parallel)
        except ValueError as error:
            found.append(str(error))
    return found
