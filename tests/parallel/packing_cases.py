"""What the ranks do in the tests of packed documents. What must hold is checked by the parent process."""

import dataclasses
import warnings

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.data.packing import PADDING, apart, pack
from minitorch_dist.nn.transformer import FAMILIES, places
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context import context as cp
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential, full_state_dict
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward, placement_of, schedule_of
from minitorch_dist.parallel.sharding import annotate
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, LENGTH, BATCH, STEPS = 13, 16, 8, 3
MICRO_SHARDS = 4
OPTIONS = {"gpt": {"kv_heads": 4}, "llama": FAMILIES["llama"] | {"kv_heads": 4, "tied": False, "hidden": 12}}


def packed():
    rng = np.random.default_rng(8)
    return pack([rng.integers(0, VOCABULARY, n) for n in rng.integers(2, 24, 24)], LENGTH)


def gpt(family, dropout=0.0):
    mt.manual_seed(5)
    return nn.GPT(VOCABULARY, LENGTH, layers=2, heads=4, dim=16, dropout=dropout, attention_dropout=dropout,
                  dtype=np.float64, **OPTIONS[family])


def loss_sum(model, shard):
    return nn.cross_entropy(model(*apart(shard.inputs)), shard.labels, reduction="sum")


def tiled_loss_sum(model, shard):
    """The same without logits."""
    return model(*apart(shard.inputs), targets=shard.labels).sum()


def batches(rows, rank=0, size=1, micro_shards=1):
    loader = data.Loader(rows.rows, rows.targets, BATCH, seed=2, rank=rank, size=size, micro_shards=micro_shards)
    every = (batch for epoch in range(STEPS) for batch in loader.epoch(epoch))
    return zip(range(STEPS), every, strict=False)


def optimizer_of(*models):
    return optim.AdamW([p for model in models for p in model.parameters()], lr=0.01, weight_decay=0.1)


def one_by_one(family):
    """(losses, parameters) of one process that runs each document alone, in rows as long as it is. family: of OPTIONS,
    or "layers"."""
    rows, model = packed(), layers() if family == "layers" else gpt(family)
    optimizer, losses = optimizer_of(model), []
    for _, batch in batches(rows):
        optimizer.zero_grad()
        total = 0.0
        for (tokens, documents), targets in zip(map(apart, batch.inputs), batch.labels, strict=True):
            for number in set(documents.tolist()) - {PADDING}:
                here = documents == number
                loss = nn.cross_entropy(model(tokens[None, here]), targets[None, here], reduction="sum")
                (loss / (batch.count * rows.units)).backward()
                total += loss.item()
        optimizer.step()
        losses.append(total / (batch.count * rows.units))
    return losses, {name: p.numpy().copy() for name, p in model.named_parameters()}


def train(family, options):
    """The same of packed rows; options: those of `trained`, by name."""
    return trained(family, **options)


def trained(family, sizes=None, stage=0, how="ring", sequence=False, exact=False, dropout=0.0, loss=loss_sum,
            **options):
    """sizes: {axis: ranks}; options: train_step's."""
    mesh = comm.DeviceMesh(**{"dp": -1, "cp": 1, "tp": 1} | (sizes or {}))
    rows, model, ranks = packed(), gpt(family, dropout), mesh["dp", "cp"]
    if mesh["tp"].size > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), sequence)
    if mesh["cp"].size > 1:
        cp.context_parallel(model, mesh["cp"], how)
    usual = {"exact": exact, "micro_shards": MICRO_SHARDS}
    replica = fully_shard(model, ranks, stage, **usual) if stage else DistributedDataParallel(
        model, ranks, bucket_cap_mb=0.004, **usual)
    optimizer, losses = optimizer_of(replica), []
    for step, batch in batches(rows, mesh.coords["dp"], mesh["dp"].size, MICRO_SHARDS if exact else 1):
        part = cp.cut_sequence(batch, mesh["cp"]) if mesh["cp"].size > 1 else batch
        losses.append(training.train_step(replica, optimizer, part, loss, ranks, seed=3, step=step,
                                          units=rows.units, micro_shards=MICRO_SHARDS, **options)[0])
    return losses, ranks.broadcast_object(tp.full_state_dict(replica)) if stage else tp.full_state_dict(model)


def annotated(family, device="cpu"):
    """(the loss, parameters after a step of gradient descent) of all rows, by a model whose matrices lie on a mesh."""
    rows, model, cut = packed(), gpt(family).to(device), comm.world().size > 1
    tokens, documents = apart(rows.rows[:BATCH])
    if cut:
        mesh = comm.DeviceMesh(dp=-1, op=2)
        annotate.shard_parameters(model, mesh, annotate.megatron(model, "op"))
        tokens = annotate.split(tokens, 0, mesh["dp"])
    loss = nn.cross_entropy(model(tokens, documents), rows.targets[:BATCH], reduction="sum")
    loss.backward()
    optim.SGD(model.parameters(), lr=1.0).step()
    return loss.item(), annotate.full_state_dict(model) if cut else model.state_dict()


def annotated_on_gpu(family):
    """The same on the stand-in for a GPU."""
    from tests.device.fake_cupy import installed
    with warnings.catch_warnings(), installed():
        return annotated(family, "cuda")


# ---------------------------------------------------------------- pipelines

class Tokens(nn.Module):
    """Tokens' features, and those of their places in their documents."""

    def __init__(self, dim):
        super().__init__()
        self.token, self.place = (nn.Embedding(n, dim, np.float64) for n in (VOCABULARY, LENGTH))
        self.context = None

    def forward(self, tokens, documents=None):
        if documents is None:
            return self.token(tokens) + self.place(slice(tokens.shape[1]))
        positions = slice(None) if self.context is None else self.context.positions(tokens.shape[1])
        return self.token(tokens) + self.place(places(documents)[:, positions])


def layers(dropout=0.0):
    """A language model as layers, of which some take documents."""
    mt.manual_seed(5)
    blocks = [nn.TransformerBlock(8, 2, causal=True, rotary=True, dropout=dropout, dtype=np.float64) for _ in range(2)]
    return nn.Sequential(Tokens(8), *blocks, nn.LayerNorm(8, dtype=np.float64),
                         nn.Linear(8, VOCABULARY, dtype=np.float64))


def scores_loss(scores, labels):
    return nn.cross_entropy(scores, labels, reduction="sum")


def staged(name, micro_batches, sizes=None, stage=0, exact=False, recompute=False):
    """(losses, whole parameters, bytes sent along pp, rows of all batches) of a pipeline that takes packed rows."""
    mesh = comm.DeviceMesh(**{"dp": -1, "cp": 1, "pp": 2, "tp": 1} | (sizes or {}))
    rows, model, pp, ranks = packed(), layers(0.2 if exact else 0.0), mesh["pp"], mesh["dp", "cp"]
    if mesh["tp"].size > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    if mesh["cp"].size > 1:
        cp.context_parallel(model, mesh["cp"])
        model[0].context = model[1].attention.context
    for block in model[1:3] if recompute else ():
        block.forward = mt.checkpoint(block.forward)
    schedule = schedule_of(name, pp.size, micro_batches, 2)
    placement = placement_of(schedule)
    parts = cut_sequential(model, sum(map(len, placement)), [1] * 5)
    chunks = [fully_shard(parts[i], ranks, stage) if stage else DistributedDataParallel(
        parts[i], ranks, exact=exact, micro_shards=MICRO_SHARDS) for i in placement[pp.rank]]
    pipeline, losses, count = Pipeline(chunks, pp, schedule), [], 0
    optimizer = optimizer_of(*chunks)
    with ledger.record() as book:
        for step, batch in batches(rows, mesh.coords["dp"], mesh["dp"].size, MICRO_SHARDS if exact else 1):
            part = cp.cut_sequence(batch, mesh["cp"]) if mesh["cp"].size > 1 else batch
            optimizer.zero_grad()
            losses.append(pipeline.run(part, scores_loss, seed=3, step=step, units=rows.units, over=ranks, packed=True,
                                       micro_shards=MICRO_SHARDS))
            optimizer.step()
            count += batch.count
    return losses, full_state_dict(chunks, pp), book.bytes_sent["pp", "send"], count


def without_attention():
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), *(nn.Tanh() for _ in range(3)), nn.Linear(8, VOCABULARY))


def differing():
    """What each rank is told where the two don't mean the same rows, or both mean what can't be; and the loss of plain
    rows after that."""
    world, rows, found = comm.world(), packed(), {}
    _, batch = next(batches(rows))
    first = world.rank == 0

    def run(what, inputs, packed, middle=None, part=batch, stages=layers):
        whole = stages()
        if middle is not None:
            whole._modules["1"] = middle
        pair = world.split(0)       # a MismatchError ends a communicator
        pipeline = Pipeline([cut_sequential(whole, 2, [1] * 5)[pair.rank]], pair, one_forward_one_backward(2, 2))
        part = dataclasses.replace(part, inputs=inputs, shards=[dataclasses.replace(part.shards[0], inputs=inputs)])
        try:
            found[what] = pipeline.run(part, scores_loss, seed=0, step=0, packed=packed)
        except (TypeError, ValueError, RuntimeError) as error:
            found[what] = f"{type(error).__name__}: {error}"
    inputs = batch.inputs
    run("not said", inputs, False)
    run("said by one", inputs, first)
    run("other documents", inputs + [0, not first], True)
    run("malformed on one", inputs if first else inputs[..., :1], True)
    run("plain on one", inputs if first else inputs[..., 0], True)
    run("floats", inputs.astype(float), True)
    run("hidden", inputs, True, nn.Sequential(nn.Tanh(), nn.MultiHeadAttention(8, 2, dtype=np.float64)))
    run("said by one, and nobody takes documents", inputs[..., 0], first, stages=without_attention)
    _, half = next(batches(rows, world.rank, world.size))      # of a loader for ranks that divide the samples
    run("other rows", half.inputs[..., 0], False, part=half, stages=without_attention)
    run("plain", inputs[..., 0], False)
    return found


def nobody_asks():
    """What a pipeline without attention says of packed=True, and its loss of pairs of numbers of somebody's own."""
    world, rows = comm.world(), packed()
    stages = cut_sequential(without_attention(), 2, [1] * 5)
    pipeline = Pipeline([stages[world.rank]], world, one_forward_one_backward(2, 2))
    _, batch = next(batches(rows))
    try:
        pipeline.run(batch, scores_loss, seed=0, step=0, packed=True)
    except ValueError as error:
        told = str(error)
    pairs = data.Loader(np.maximum(rows.rows, 0), rows.targets, BATCH)
    return told, pipeline.run(next(iter(pairs.epoch(0))), lambda y, labels: scores_loss(y[:, :, 0], labels), seed=0,
                              step=0)


# ---------------------------------------------------------------- rings

def arrays(n, time, *key):
    """q, k, v, cotangent, and numbers of documents that don't stand side by side."""
    rng = np.random.default_rng([n, time, *key])
    q, k, v, u = (rng.standard_normal((2, h, time, s)) for h, s in ((4, 3), (2, 3), (2, 5), (4, 5)))
    return q, k, v, u, rng.integers(0, 3, (2, time))


def ring(layout, causal, how="ring"):
    """Ring attention's y and gradients with documents, a Tensor, as whole sequences; and the definition's
    derivatives."""
    world = comm.world()
    *xs, documents = arrays(world.size, 6 * world.size)
    documents = mt.Tensor(documents)
    q, k, v, u = (cp.cut_sequence(x, world, layout, axis=2) for x in xs)
    y, pull = mt.vjp(lambda *x: cp.HOW[how](*x, world, causal, layout, None, documents), q, k, v)
    _, tangent = mt.jvp(lambda *x: cp.HOW[how](*x, world, causal, layout, None, documents), (q, k, v), (q, k, v))
    return [np.array(cp.join_sequence(x, world, layout, axis=2)) for x in (y, *pull(u), tangent)]


def blocks(documents):
    """(products, bytes sent) of a causal ring's forward, of 8 chunks of 2 positions each; documents: of the chunks."""
    world = comm.world()
    q, k, v, _, _ = (cp.cut_sequence(x, world, axis=-2 if x.ndim > 2 else 1) for x in arrays(world.size, 16))
    numbers = None if documents is None else np.tile(np.repeat(documents, 2), (2, 1))
    with ledger.record() as book:
        cp.HOW["ring"](q, k, v, world, True, "zigzag", None, numbers)
    return book.launches["attention_block"], book.total_bytes_sent()


def disagreeing():
    """What each rank is told whose documents are others than the next rank's."""
    world = comm.world()
    q, k, v, _, documents = arrays(world.size, 4 * world.size)
    parts = [cp.cut_sequence(x, world, axis=2) for x in (q, k, v)]
    try:
        cp.HOW["ring"](*parts, world, True, "zigzag", None, documents + world.rank)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None
