"""What the ranks do in the tests of models of parts. What must hold is checked by the parent process."""

import copy
import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.autodiff.ops.attention import ALL
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context import context as cp
from minitorch_dist.parallel.context import ring_attention as ring
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines import full_state_dict as full_of_stages
from minitorch_dist.parallel.pipelines.schedules import zb_h1
from minitorch_dist.parallel.positions import PartDropout
from minitorch_dist.parallel.tensor import tensor_parallel as tp
from tests.parallel.context_cases import values
from tests.parallel.sequence_cases import instead

VOCABULARY, LENGTH, BATCH, STEPS, CLIP = 13, 16, 5, 3, 0.5
SETTINGS = {        # GPT's arguments
    "learned": {"dropout": 0.2, "kv_heads": 4},
    "rotary": {"positions": "rotary", "tied": False, "norm": "rms", "kv_heads": 2, "gated": True},
    "stretched": {"positions": nn.Rotary(100, 4, 4), "tied": False, "norm": "rms"},
    "dropped": {"dropout": 0.2, "attention_dropout": 0.3, "sinks": True, "kv_heads": 4},
    "latents dropped": {"positions": "rotary", "latent": {"kv_rank": 6, "q_rank": 5}, "attention_dropout": 0.3},
    "linear": {"window": ("linear", None), "dropout": 0.2, "qk_norm": True},
    "delta": {"window": ("delta", None), "dropout": 0.2, "qk_norm": True},
    "blocks": {"window": ("2x3", None), "dropout": 0.2, "positions": "rotary", "gated": True},
    "mixture": {"dropout": 0.2, "moe": {
        "experts": 4, "capacity_factor": None, "group": "sequence", "balance": 0.3, "z": 0.1, "std": 0.3,
        "sequence_balance": 0.2}},
}


def gpt(setting):
    mt.manual_seed(5)
    return nn.GPT(VOCABULARY, LENGTH, layers=2, heads=4, dim=16, dtype=np.float64, **SETTINGS[setting])


def sequences():
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (12, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_sum(model, shard):
    logits = model(shard.inputs)
    logits, aux = logits if isinstance(logits, tuple) else (logits, 0)
    return nn.cross_entropy(logits, shard.labels, reduction="sum") + shard.labels.size * aux


def batches(mesh, layout="zigzag", steps=STEPS):
    """Parts of (step, global batch), so many of them; the last of an epoch is smaller."""
    samples = mesh["dp", "ep"] if "ep" in mesh.axes else mesh["dp"]
    loader = data.Loader(*sequences(), BATCH, seed=2, rank=samples.rank, size=samples.size)
    every = (batch for epoch in range(steps) for batch in loader.epoch(epoch))
    for step, batch in zip(range(steps), every, strict=False):
        yield step, batch if mesh["cp"].size == 1 else cp.cut_sequence(batch, mesh["cp"], layout)


def train(setting, sizes, how="ring", layout="zigzag", stage=0, tensor_first=True, sequence=False, overlap=False,
          steps=STEPS):
    """(losses, whole parameters) after so many steps of AdamW with dropout and clipping; sizes: {axis: ranks}."""
    mesh = comm.DeviceMesh(**{"dp": -1, "cp": 1, "ep": 1, "tp": 1} | sizes)
    model, ranks = gpt(setting), mesh["dp", "cp", "ep"]
    if mesh["ep"].size > 1:
        tp.parallelize_module(model, mesh["ep"], moe.plan_of(model))
    ways = [lambda: mesh["tp"].size > 1 and tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), sequence,
                                                                      overlap),
            lambda: mesh["cp"].size > 1 and cp.context_parallel(model, mesh["cp"], how, layout)]
    for cut in ways if tensor_first else ways[::-1]:
        cut()
    replica = fully_shard(model, ranks, stage) if stage else DistributedDataParallel(
        model, ranks, bucket_cap_mb=0.004, first_bucket_mb=0.002)
    optimizer = optim.AdamW(replica.parameters(), lr=0.01, weight_decay=0.1)
    losses = [training.train_step(replica, optimizer, batch, loss_sum, ranks, seed=3, step=step, units=LENGTH,
                                  clip=CLIP)[0] for step, batch in batches(mesh, layout, steps)]
    return losses, ranks.broadcast_object(tp.full_state_dict(replica)) if stage else tp.full_state_dict(model)


def train_whole():
    """{setting: what training a whole model gives}."""
    return {setting: train(setting, {}) for setting in SETTINGS} | {
        "stages": train_stages(1), "one step": train("learned", {}, steps=1)}


def stages(count):
    """A language model as a Sequential, cut into so many."""
    mt.manual_seed(6)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8, np.float64), *(
        nn.TransformerBlock(8, 2, causal=True, rotary=True, dropout=0.1, dtype=np.float64) for _ in range(2)),
        nn.Linear(8, VOCABULARY, dtype=np.float64))
    return model, cut_sequential(model, count, [1] * 4)


def train_stages(size):
    """(losses, whole parameters) of a pipeline of two stages whose `size` replicas share the sequences; size 1: of one
    process."""
    mesh = comm.DeviceMesh(dp=1, cp=size, pp=2 if size > 1 else 1)
    whole, parts = stages(mesh["pp"].size)
    if size > 1:
        cp.context_parallel(whole, mesh["cp"])
    replica = DistributedDataParallel(parts[mesh.coords["pp"]], mesh["cp"])
    optimizer = optim.AdamW(replica.parameters(), lr=0.01)
    pipeline, losses = Pipeline([replica], mesh["pp"], zb_h1(mesh["pp"].size, 3)), []
    for step, batch in batches(mesh):
        replica.zero_grad()
        losses.append(pipeline.run(batch, lambda y, labels: nn.cross_entropy(y, labels, reduction="sum"), seed=3,
                                   step=step, units=LENGTH, over=mesh["cp"]))
        optimizer.step()
    return losses, full_of_stages([replica], mesh["pp"])


def kept(how):
    """Bytes of activations that a GPT keeps for backward, of the same sequences on any number of ranks."""
    axis = comm.DeviceMesh(cp=-1)["cp"]
    model = cp.context_parallel(gpt("learned"), axis, how)
    model.context.summed = True
    part = cp.cut_sequence(sequences()[0][:3], axis)
    with ledger.record(memory=True) as book:
        y = model(part)
        live = book.live["activation"]
    del y
    return live


# ---------------------------------------------------------------- wrong on purpose

def _draw_of_part(self, x):
    return nn.Dropout.forward(self, x)


def _rows_from_0(self, time):
    return np.arange(time)


COME_BY, PRODUCTS, MERGE, PULL = ring.come_by, ring.products, ring._merge, ring._attend_pullback


def _first_only(o, logs, o_more, logs_more):
    """The last piece takes the place of those before it."""
    o[...], logs[...] = o_more, logs_more


def _unweighted(o, logs, o_more, logs_more):
    o += o_more
    logs[...] = np.logaddexp(logs, logs_more)


def _own_cotangent(ct, q, k, v, o, logs, *rest):
    """The sums over a row of a piece, instead of all pieces."""
    piece, logs_of_piece = ring._attend(q, k, v, *rest)
    return PULL(ct, q, k, v, piece, logs_of_piece, *rest)


def _not_arrived(x, comm, **more):
    """What one has is what comes."""
    return ((rank, x) for rank, _ in COME_BY(x, comm, **more))


def _no_diagonal(*args):
    return [(rows, columns, ALL) for rows, columns, _ in PRODUCTS(*args)]


WRONG = {       # name: (where, attribute, what stands there instead)
    "each rank draws a mask of its part": (PartDropout, "forward", _draw_of_part),
    "positions begin at 0 on every rank": (cp.Context, "positions", _rows_from_0),
    "the last piece alone": (ring, "_merge", _first_only), "pieces added": (ring, "_merge", _unweighted),
    "softmax of a piece in backward": (ring, "_attend_pullback", _own_cotangent),
    "nothing goes round": (ring, "come_by", _not_arrived), "the diagonal is whole": (ring, "products", _no_diagonal),
}


def train_wrong():
    """{what is wrong: parameters} on two ranks, after one step."""
    found = {}
    for name, change in WRONG.items():
        with instead(*change):
            found[name] = train("learned", {"cp": 2}, steps=1)[1]
    return found


# ---------------------------------------------------------------- use

def composed():
    """What other parts of the library make of it: {name: whether it is right}."""
    mesh, found = comm.DeviceMesh(dp=1, cp=-1), {}
    tokens, u = sequences()[0][:3], values((3, LENGTH, VOCABULARY), 4)
    axis = mesh["cp"]
    part, ct = cp.cut_sequence(tokens, axis), cp.cut_sequence(u, axis)
    whole = gpt("learned").eval()
    logits = whole(tokens)
    logits.backward(mt.tensor(u))

    def right(run):
        model = cp.context_parallel(gpt("learned").eval(), axis)
        replica = DistributedDataParallel(model, axis)
        y = run(replica, model)
        y.backward(mt.tensor(ct))
        return np.allclose(cp.join_sequence(y.numpy(), axis), logits.numpy(), rtol=0, atol=1e-12) and all(
            np.allclose(a.grad.numpy(), b.grad.numpy(), rtol=0, atol=1e-11)
            for a, b in zip(model.parameters(), whole.parameters(), strict=True))

    def checkpointed(replica, model):
        model.blocks.forward = mt.checkpoint(type(model.blocks).forward.__get__(model.blocks))
        return replica(part)

    def compiled(replica, model):
        return mt.compile(replica)(part)
    nothing = mt.tensor(np.zeros((0, 2, 4, 3)), requires_grad=True)
    y = cp.ring_attention(nothing, nothing, nothing, axis, True)
    y.backward(mt.tensor(np.zeros(y.shape)))
    found["no samples"] = y.shape == nothing.grad.shape == (0, 2, 4, 3)
    nothing = mt.tensor(np.zeros((1, 2, 0, 3)), requires_grad=True)
    y = cp.ring_attention(nothing, nothing, nothing, axis, True)
    y.backward(mt.tensor(np.zeros(y.shape)))
    found["no positions"] = y.shape == nothing.grad.shape == (1, 2, 0, 3)
    found["axes from the end"] = np.array_equal(cp.cut_sequence(tokens, axis, axis=-1), part)
    evaluated = cp.context_parallel(gpt("learned").eval(), axis)        # nobody sums, and nobody has to
    found["evaluated"] = np.allclose(cp.join_sequence(evaluated(part).numpy(), axis), logits.numpy(), rtol=0,
                                     atol=1e-12)
    found["plain"] = right(lambda replica, model: replica(part))
    found["checkpointed"] = right(checkpointed)
    found["compiled"] = right(compiled)
    model, called = gpt("learned"), []
    handle = model.dropout.register_forward_hook(lambda *args: called.append(args))
    cp.context_parallel(model, axis)
    with mt.no_grad():
        model(part)
        handle.remove()
        model(part)
    found["hooks"] = len(called) == 1
    found["names"] = list(model.state_dict()) == list(whole.state_dict())
    found["it says so"] = f"rank {axis.rank} of {axis.size}" in str(model)
    other = gpt("learned")
    other.load_state_dict(model.state_dict())
    found["state"] = all((p.numpy() == q.numpy()).all()
                         for p, q in zip(other.parameters(), model.parameters(), strict=True))
    return found


def parts():
    """What cut_sequence gives of 0 … 15 in each layout, and whether join_sequence undoes it, gradients too."""
    world, found = comm.world(), {}
    x = values((2, 16, 3), 5)
    for layout in ring.LAYOUTS:
        part = mt.tensor(cp.cut_sequence(x, world, layout), requires_grad=True)
        y = cp.join_sequence(part, world, layout)
        y.backward(mt.tensor(x))        # of each rank's copy
        same = (y.numpy() == x).all() and np.allclose(part.grad.numpy(), world.size * part.numpy())
        turned = x.swapaxes(1, 2)
        last = cp.cut_sequence(turned, world, layout, -1)
        same &= (last == part.numpy().swapaxes(1, 2)).all()
        same &= (cp.join_sequence(last, world, layout, -1) == turned).all()
        found[layout] = cp.cut_sequence(np.arange(16)[None], world, layout)[0].tolist(), bool(same)
    return found


def program(path, *flags):
    """(exit status, stdout, stderr) of a program, run here as if it had been started."""
    out, err = io.StringIO(), io.StringIO()
    with instead(sys, "argv", [path, *flags]), redirect_stdout(out), redirect_stderr(err):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            return end.code, out.getvalue(), err.getvalue()
    return None


class Noisy(nn.Dropout):
    """A Dropout of somebody's own."""

    def forward(self, x):
        return 2.0 * x if self.training else x


def errors():
    """{what is wrong: (type, message)}."""
    world, found = comm.world(), {}

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)

    def q(*shape):
        return np.zeros(shape)

    def cut(model, **options):
        return cp.context_parallel(model, world, **options)
    tokens = np.zeros((2, 6), int)
    attempt("length", lambda: cp.cut_sequence(tokens, world))
    attempt("short", lambda: cp.cut_sequence(tokens[:, :1], world, "contiguous"))
    attempt("axis", lambda: cp.cut_sequence(tokens[0], world))
    attempt("axis before the first", lambda: cp.cut_sequence(tokens[0], world, axis=-2))
    attempt("layout", lambda: cut(gpt("learned"), layout="striped"))
    attempt("how", lambda: cut(gpt("learned"), how="gather"))
    attempt("odd part", lambda: cp.ring_attention(q(1, 2, 3, 4), q(1, 2, 3, 4), q(1, 2, 3, 4), world, True))
    attempt("odd part by heads", lambda: cp.ulysses_attention(*[q(1, 2, 3, 4)] * 3, world))
    attempt("shapes", lambda: cp.ring_attention(q(1, 2, 4, 4), q(1, 2, 6, 4), q(1, 2, 6, 4), world))
    good = (1, 2, 4, 4)
    for name, shapes in {"axes": [(2, 4, 4)] * 3, "values": (good, good, (1, 2, 6, 4)),
                         "batch": ((2, 2, 4, 4), good, good), "size": ((1, 2, 4, 3), good, good),
                         "groups": ((1, 3, 4, 4), good, good), "no groups": (good, (1, 0, 4, 4), (1, 0, 4, 4))}.items():
        attempt(f"shapes: {name}", lambda shapes=shapes: cp.ring_attention(*(q(*s) for s in shapes), world))
    attempt("heads", lambda: cp.ulysses_attention(q(1, 3, 4, 4), q(1, 3, 4, 4), q(1, 3, 4, 4), world))
    attempt("kv heads", lambda: cp.ulysses_attention(q(1, 4, 4, 4), q(1, 1, 4, 4), q(1, 1, 4, 4), world))
    attempt("heads of a model", lambda: cut(nn.TransformerBlock(6, 3), how="all_to_all"))
    attempt("blocks", lambda: cut(gpt("blocks")))
    attempt("no attention", lambda: cut(nn.Sequential(nn.Linear(3, 4))))
    attempt("mixture", lambda: cut(nn.GPT(VOCABULARY, LENGTH, moe={"experts": 2})))
    for name, layer in {"convolution": nn.Conv1d(6, 6, 3, padding=1), "pooling": nn.AvgPool2d(2),
                        "flattened": nn.Flatten(), "own dropout": Noisy(0.5)}.items():
        attempt(name, lambda layer=layer: cut(nn.Sequential(nn.MultiHeadAttention(6, 2), layer)))
    attempt("image", lambda: cut(nn.ImageTransformer()))
    attempt("twice", lambda: cut(cut(gpt("learned"))))
    model = gpt("learned")
    model = cut(gpt("learned"))
    attempt("generate", lambda: model.generate(tokens, 1))
    attempt("weights", lambda: model.blocks[0].attention.weights(q(2, 4, 16)))
    attempt("longer", lambda: model(np.zeros((1, LENGTH), int)))
    attempt("copied", lambda: copy.deepcopy(model))
    attempt("not summed", lambda: model(tokens[:, :4]))
    alone = world.split(world.rank, name="alone")
    attempt("not all ranks", lambda: DistributedDataParallel(model, alone))
    attempt("not all ranks, sharded", lambda: fully_shard(cut(gpt("learned")), alone))
    attempt("exact", lambda: DistributedDataParallel(cut(gpt("learned")), world, exact=True))
    attempt("exact, sharded", lambda: fully_shard(cut(gpt("learned")), world, exact=True))
    model.eval()
    found["evaluated"] = model(tokens[:, :4]).shape
    return found
