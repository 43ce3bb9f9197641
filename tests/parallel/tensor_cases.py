"""What the ranks do in the tests of tensor parallelism. What must hold is checked by the parent process."""

import copy
import pickle
from unittest.mock import patch

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.backend import tiled_cross_entropy
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, LENGTH, BATCH, STEPS, CLIP = 13, 6, 12, 15, 0.5
SETTINGS = {        # GPT's arguments, and what the plan says of its output
    "tied": ({"kv_heads": 2, "dropout": 0.2}, None),
    "rotary, untied": ({"positions": "rotary", "tied": False, "norm": "rms", "attention_dropout": 0.3}, None),
    "logits stay apart": ({"dropout": 0.1, "sinks": True, "kv_heads": 2, "gated": True}, "vocabulary, not gathered"),
    "by tiles": ({"dropout": 0.1}, None), "linear": ({"window": ("linear", None), "dropout": 0.1}, None),
    "delta": ({"window": ("delta", None), "dropout": 0.1}, None),
    "blocks": ({"window": ("2x2", None), "kv_heads": 2}, None),
}


def values(shape, *key):
    return np.random.default_rng(list(key)).standard_normal(shape)


def gpt(setting):
    mt.manual_seed(5)
    return nn.GPT(VOCABULARY, LENGTH, layers=2, heads=4, dim=16, dtype=np.float64, **SETTINGS[setting][0])


def plan_for(model, setting):
    return tp.plan_of(model) | ({"embed": SETTINGS[setting][1]} if SETTINGS[setting][1] else {})


def sequences():
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (40, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def train(setting, tp_size, sequence_parallel=False):
    """(losses, whole parameters, how many bytes of parameters this rank has) after STEPS steps of AdamW with clipping,
    on a mesh of tp_size ranks along tp."""
    mesh = comm.DeviceMesh(dp=-1, tp=tp_size)
    model = gpt(setting)
    if tp_size > 1:
        tp.parallelize_module(model, mesh["tp"], plan_for(model, setting), sequence_parallel)
    nbytes = sum(p.data.nbytes for p in model.parameters())
    replica = DistributedDataParallel(model, mesh["dp"])
    optimizer = optim.AdamW(replica.parameters(), lr=0.01, weight_decay=0.1)
    loader = data.Loader(*sequences(), BATCH, seed=2, rank=mesh.coords["dp"], size=mesh["dp"].size)

    def loss_sum(model, shard):
        if setting == "by tiles":
            return model(shard.inputs, targets=shard.labels).sum()
        if setting == "logits stay apart" and tp_size > 1:
            return tp.vocab_parallel_cross_entropy(model(shard.inputs), shard.labels, mesh["tp"], VOCABULARY, "sum")
        return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")
    losses, norms, by_hand = [], [], tp_size > 1 and setting == next(iter(SETTINGS))

    def clip(replica):
        norms.append(optim.clip_grad_norm_(model.parameters(), CLIP))
    batches = (batch for epoch in range(STEPS) for batch in loader.epoch(epoch))
    for step, batch in zip(range(STEPS), batches, strict=False):
        losses.append(training.train_step(replica, optimizer, batch, loss_sum, mesh["dp"], seed=3, step=step,
                                          units=LENGTH, clip=clip if by_hand else CLIP)[0])
    assert not norms or max(norms) > CLIP
    return losses, tp.full_state_dict(model), nbytes


def train_whole():
    """{setting: what training a whole model gives}."""
    return {setting: train(setting, 1) for setting in SETTINGS}


def layers():
    """y and the gradients of x, of this rank's parts and of the whole biases: for the parent to compare."""
    world = comm.world()
    mt.manual_seed(1)
    first, second, third = nn.Linear(5, 7, dtype=np.float64), nn.Linear(7, 4, dtype=np.float64), \
        nn.Linear(4, 6, bias=False, dtype=np.float64)
    whole = [p.numpy().copy() for layer in (first, second, third) for p in layer.parameters()]
    model = nn.Sequential(tp.ColumnParallelLinear(first, world), nn.Tanh(), tp.RowParallelLinear(second, world),
                          tp.ColumnParallelLinear(third, world, gather_output=True),
                          tp.RowParallelLinear(nn.Linear(6, 2, dtype=np.float64), world, input_is_parallel=False))
    whole += [tp.full_state_dict(model)["4.weight"], model[4].bias.numpy().copy()]
    x = mt.tensor(values((3, 5), 2), requires_grad=True)
    y = model(x)
    y.backward(mt.tensor(values((3, 2), 3)))
    return whole, y.numpy(), x.grad.numpy(), [p.grad.numpy() for p in model.parameters()]


def loss_of_parts(shift, smoothing, z_loss):
    """vocab_parallel_cross_entropy's (mean, none, gradient of this rank's logits)."""
    world, n = comm.world(), 11
    lo, hi = data.loader.share(n, world.rank, world.size)
    logits = mt.tensor(values((4, 3, n), 4)[..., lo:hi] * 3 + shift, requires_grad=True)
    labels = np.random.default_rng(5).integers(0, n, (4, 3))
    labels[2, 1] = -100
    losses = tp.vocab_parallel_cross_entropy(logits, labels, world, n, "none", label_smoothing=smoothing, z_loss=z_loss)
    losses.backward(mt.tensor(values((4, 3), 6)))
    mean = tp.vocab_parallel_cross_entropy(logits, labels, world, n, label_smoothing=smoothing, z_loss=z_loss)
    return mean.item(), losses.numpy(), logits.grad.numpy()


def of_bytes():
    """Rows for tokens in 8 bits, of more rows than these can number, and losses for labels of this kind."""
    world, numbers = comm.world(), np.array([[3, 255, 0]], np.uint8)
    embedding = tp.VocabParallelEmbedding(nn.Embedding(700, 2), world)
    whole = tp.full_state_dict(embedding)["weight"]
    lo, hi = data.loader.share(700, world.rank, world.size)
    logits = values((1, 3, 700), 4)
    losses = tp.vocab_parallel_cross_entropy(mt.tensor(logits[..., lo:hi]), numbers, world, 700, "none")
    return ((embedding(numbers).numpy() == whole[numbers]).all(),
            np.allclose(losses.numpy(), nn.cross_entropy(mt.tensor(logits), numbers, "none").numpy(), rtol=1e-12))


def tiled(n, dtype, cut):
    """Of losses by tiles of divided classes, with labels that are ignored: (losses, gradients of the sum of x over all
    ranks and of this rank's rows, a directional second derivative, bytes sent forward and backward, bytes kept)."""
    world = comm.world()
    whole = nn.Linear(5, n, bias=False, weight_init=lambda shape, _: values(shape, 4).astype(dtype))
    layer = tp.ColumnParallelLinear(whole, world, gather_output=cut != "not gathered")
    labels = np.random.default_rng(5).integers(0, n, (4, 3))
    labels[1, 2] = -100
    x, u = mt.tensor(values((4, 3, 5), 7).astype(dtype), requires_grad=True), values((4, 3), 6).astype(dtype)
    with ledger.record(memory=True) as forward:
        losses = layer.losses(x, labels)
        kept = forward.live["activation"]
    with ledger.record() as backward:
        losses.backward(mt.tensor(u))

    def slope(x):
        return (mt.grad(lambda x: (layer.losses(x, labels) * u).sum())(x) * u[..., None]).sum()
    return (losses.numpy(), x.grad.numpy(), layer.weight.grad.numpy(), mt.grad(slope)(x.detach()).numpy(),
            sum(forward.bytes_sent.values()), sum(backward.bytes_sent.values()), kept)


def losses_of(options, sequence_parallel=None, overlap=False, compiled=False, z_loss=0.0):
    """(losses, whole gradients) of a GPT that is cut, and given targets; by default of a whole one's logits."""
    mt.manual_seed(5)
    world, model = comm.world(), nn.GPT(701, 8, layers=1, heads=2, dim=8, dtype=np.float64, **options)
    tokens, targets = np.random.default_rng(8).integers(0, 701, (2, 3, 8))
    targets[0, 2] = targets[2, 7] = -100
    if sequence_parallel is None:
        losses = nn.cross_entropy(model(tokens), targets, "none", z_loss=z_loss)
    else:
        tp.parallelize_module(model, world, tp.plan_of(model), sequence_parallel, overlap)
        with patch.object(tiled_cross_entropy, "HOST", 1):      # two narrow tiles for each of two ranks
            losses = (mt.compile(model) if compiled else model)(tokens, targets=targets, z_loss=z_loss)
    losses.sum().backward()
    with mt.no_grad():      # so that full_state_dict gives gradients
        for p in model.parameters():
            p[...] = p.grad
    return losses.numpy(), tp.full_state_dict(model)


def counted(options):
    """{pass: {op: (calls, bytes sent)}} along tp of one transformer block, and the bytes of its output."""
    mesh = comm.DeviceMesh(tp=-1)
    block = nn.TransformerBlock(16, 4, causal=True, dtype=np.float64, **options)
    tp.parallelize_module(block, mesh["tp"], tp.plan_of(block))
    x = mt.tensor(values((2, 3, 16), 7), requires_grad=True)
    with ledger.record() as forward:
        y = block(x)
    with ledger.record() as backward:
        y.backward(mt.tensor(values(y.shape, 8)))
    return {name: {op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls if axis == "tp"}
            for name, book in (("forward", forward), ("backward", backward))}, y.data.nbytes


def written():
    """What the whole model writes and what the cut one does; the whole state after a round trip through another one."""
    mesh = comm.DeviceMesh(tp=-1)
    whole, model = gpt("tied"), gpt("tied")
    tp.parallelize_module(model, mesh["tp"], {"embed": "vocabulary", "blocks.*.attention": "heads",
                                              "blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row"})
    start = sequences()[0][:3, :2]
    texts = [m.generate(start, 7, temperature=0, cache=True) for m in (whole, model)]
    changed = {name: value + 1 for name, value in whole.state_dict().items()}
    tp.load_full_state_dict(model, changed)
    again = tp.full_state_dict(model)
    return texts, all((again[name] == value).all() for name, value in changed.items()) and list(again) == list(changed)


def errors():
    """{what is wrong: (type, message)}, and whether the models are as they were."""
    world, found = comm.world(), {}

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    model = gpt("tied")
    before = list(model.state_dict())
    attempt("way", lambda: tp.parallelize_module(model, world, {"embed": "columns"}))
    attempt("path", lambda: tp.parallelize_module(model, world, {"embed": "vocabulary", "block.*": "row"}))
    attempt("kind", lambda: tp.parallelize_module(model, world, {"blocks.*.mlp": "row"}))
    attempt("tied", lambda: tp.parallelize_module(tied(), world, {"0": "row"}))
    attempt("nested", lambda: tp.parallelize_module(model, world, {
        "blocks.0.attention": "heads", "blocks.0.attention.qkv": "column"}))
    assert list(model.state_dict()) == before and type(model.embed) is nn.Embedding
    gated = nn.TransformerBlock(4, 2, mlp="swiglu", hidden=6)
    attempt("gated", lambda: tp.parallelize_module(gated, world, {"mlp.0": "column", "mlp.2": "row"}))
    later = nn.Sequential(nn.Identity(), nn.Linear(4, 12), nn.Dropout(0.1), nn.SwiGLU(), nn.Linear(6, 4))
    attempt("gated later", lambda: tp.parallelize_module(later, world, {"1": "column", "4": "row"}))
    plain = nn.TransformerBlock(4, 2, hidden=6)
    attempt("not gated", lambda: tp.parallelize_module(plain, world, {"mlp.0": "column, gated", "mlp.2": "row"}))
    attempt("halves", lambda: tp.parallelize_module(nn.Sequential(nn.Linear(4, 7)), world, {"0": "column, gated"}))
    odd = nn.GPT(10, 8, layers=1, heads=3, dim=6)
    attempt("heads", lambda: tp.parallelize_module(odd, world, {"embed": "vocabulary", "*.attention": "heads"}))
    assert type(odd.embed) is nn.Embedding      # which came before in the plan
    rows = [[0, 1, 2], [5, 4, 3]][world.rank]       # in order on rank 0
    attempt("gathered", lambda: tp.ColumnParallelLinear(nn.Linear(4, 6), world, rows, True))
    attempt("scattered", lambda: tp.RowParallelLinear(nn.Linear(4, 6), world, np.arange(world.rank, 4, 2), False))
    attempt("rows", lambda: tp.VocabParallelEmbedding(nn.Embedding(1, 4), world))
    optim.SGD(model.parameters(), lr=0.1)
    attempt("late", lambda: tp.parallelize_module(model, world, {"embed": "vocabulary"}))
    embedding = tp.VocabParallelEmbedding(nn.Embedding(5, 4), world)
    attempt("number", lambda: embedding(np.array([0, 5])))
    attempt("labels", lambda: tp.vocab_parallel_cross_entropy(values((4, 3), 9), np.zeros(3, int), world, 6))
    attempt("label", lambda: tp.vocab_parallel_cross_entropy(values((1, 3), 9), np.array([6]), world, 6))
    attempt("ignored", lambda: tp.vocab_parallel_cross_entropy(values((1, 3), 9), np.array([-100]), world, 6))
    plain = nn.Linear(4, 6, bias=False)
    column = tp.ColumnParallelLinear(plain, world, gather_output=True)
    attempt("targets", lambda: column.losses(values((2, 3, 4), 9), np.zeros((3, 2), int)))
    attempt("target", lambda: column.losses(values((2, 4), 9), np.array([5, 6])))
    attempt("order", lambda: tp.ColumnParallelLinear(plain, world, np.arange(world.rank, 6, 2)).losses(
        values((2, 4), 9), np.array([0, 1])))
    column.product = backwards
    attempt("product", lambda: column.losses(values((2, 4), 9), np.array([0, 1])))
    attempt("reduction", lambda: tp.vocab_parallel_cross_entropy(values((1, 3), 9), np.array([5]), world, 6, "avg"))
    copied = pickle.loads(pickle.dumps(list(tp.ColumnParallelLinear(nn.Linear(3, 4), world).parameters())))
    attempt("norm", lambda: optim.clip_grad_norm_(copied, 1.0))
    for kind in (optim.LAMB, optim.LARS, optim.Adafactor):
        attempt(kind.__name__, lambda kind=kind: kind(copied, lr=0.1))
    attempt("scaler", lambda: optim.GradScaler().unscale_(optim.SGD(copied, lr=0.1)))
    frozen = nn.Linear(4, 3)
    frozen.weight.requires_grad_(False)
    DistributedDataParallel(nn.Sequential(tp.RowParallelLinear(frozen, world)), world.split(world.rank))
    alone = nn.Sequential(tp.ColumnParallelLinear(nn.Linear(3, 4), world.split(world.rank)))
    alone(values((2, 3), 9)).sum().backward()
    optim.clip_grad_norm_(alone.parameters(), 1.0)
    return found


def backwards(x, weight, bias):
    return mt.linear(x, -weight, bias)


def tied():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, second)


def copied():
    """Whether a copy of a model that is cut has the same ranks, tensors of its own, and the same outputs."""
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    model = tp.parallelize_module(model, comm.world(), {"0": "column", "2": "row"})
    twin, x = copy.deepcopy(model), np.ones((2, 4), np.float32)
    return (twin[0].comm is model[0].comm, twin[0].weight is not model[0].weight,
            bool((twin(x).numpy() == model(x).numpy()).all()))
