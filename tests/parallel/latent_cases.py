"""What the ranks do in the tests of multi-head latent attention whose heads are divided."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel.collectives import gather_from, scatter_to
from minitorch_dist.parallel.sharding import annotate
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .sequence_cases import whole_gradients
from .tensor_cases import values

BATCH, TIME, DIM, HEADS = 2, 8, 20, 4
SIZES = {"queries of x": {"nope_size": 3, "rope_size": 2, "value_size": 6, "kv_rank": 7},
         "queries of latents": {"nope_size": 3, "rope_size": 2, "value_size": 6, "kv_rank": 7, "q_rank": 9}}


def block(sizes, kind, **options):
    """cut_block of multi-head latent attention."""
    return cut_block(kind, latent=SIZES[sizes], **options)


def cut_block(kind, **options):
    """(a block with biases, as it is cut, the axis). kind: None for a whole one, else sequence_parallel."""
    mt.manual_seed(3)
    model, axis = nn.TransformerBlock(DIM, HEADS, None, True, True, dtype=np.float64, std=0.3,
                                      **options), comm.DeviceMesh(tp=-1)["tp"]
    with mt.no_grad():
        for i, p in enumerate(model.parameters()):
            if len(p.shape) == 1:
                p[...] = 1 + values(p.shape, 40, i) / 2
    if kind is not None:
        tp.parallelize_module(model, axis, tp.plan_of(model), kind)
    return model, axis


def through_block(sizes, kind):
    """(y, dx, gradients), all of them whole."""
    return through(kind, *block(sizes, kind))


def through(kind, model, axis):
    """(y, dx, gradients), all of them whole, of a block that is cut."""
    x = mt.tensor(values((BATCH, TIME, DIM), 7), requires_grad=True)
    y = model(x) if not kind else gather_from(model(scatter_to(x, axis, 1)), axis, 1)
    y.backward(mt.tensor(values(y.shape, 8)))
    return y.numpy(), x.grad.numpy(), whole_gradients(model)


def counted(sizes, kind):
    """{pass: {op: (calls, bytes sent)}} along tp of one block."""
    return bytes_of(kind, *block(sizes, kind, bias=False, norm="rms"))


def bytes_of(kind, model, axis):
    """The same of a block that is cut."""
    x = mt.tensor(values((BATCH, TIME // (axis.size if kind else 1), DIM), 9), requires_grad=True)
    with ledger.record() as forward:
        y = model(x)
    with ledger.record() as backward:
        y.backward(mt.tensor(values(y.shape, 10)))
    return {name: {op: (book.calls[name_of, op], book.bytes_sent[name_of, op]) for name_of, op in book.calls
                   if name_of == "tp"} for name, book in (("forward", forward), ("backward", backward))}


def written():
    """(what the whole model writes, what the cut one does, bytes that each cache keeps)."""
    def gpt():
        mt.manual_seed(5)
        model = nn.GPT(13, 9, 2, HEADS, DIM, dtype=np.float64, **FAMILIES["deepseek"] | {
            "latent": SIZES["queries of latents"]})
        for p in model.parameters():
            p.data *= 4
        return model.eval()
    whole, model = gpt(), gpt()
    tp.parallelize_module(model, comm.DeviceMesh(tp=-1)["tp"], tp.plan_of(model))
    start = np.random.default_rng(8).integers(0, 13, (3, 4))
    kept = [nn.decoding.KeyValueCache(m) for m in (whole, model)]
    logits = [np.concatenate([cache.read(part).numpy() for part in (start, start[:, :1])], 1) for cache in kept]
    return logits, [m.generate(start, 5, 0, cache=True) for m in (whole, model)], [cache.nbytes for cache in kept]


def annotated(sizes):
    """counted's first result, of a block that is cut by annotations."""
    mesh, (model, _) = comm.DeviceMesh(tp=-1), block(sizes, None, bias=False, norm="rms")
    model = annotate.shard_parameters(model, mesh, annotate.megatron(model))
    x = annotate.replicate(values((BATCH, TIME, DIM), 9), mesh).requires_grad_()
    with ledger.record() as forward:
        y = model(x).settle()
    with ledger.record() as backward:
        y.backward(values(y.shape, 10))
    return {name: {op: (book.calls[key], book.bytes_sent[key]) for key in book.calls for op in key[1:]}
            for name, book in (("forward", forward), ("backward", backward))}
