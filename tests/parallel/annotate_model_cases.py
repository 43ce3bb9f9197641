"""What the ranks do in the tests of annotated models, and of what is sent. See annotate_cases.py."""

import copy
import pickle
import re
import warnings

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger, nn, optim
from minitorch_dist.autodiff.primitive import Primitive, bind
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context import context_parallel
from minitorch_dist.parallel.sharding import annotate as a
from minitorch_dist.parallel.sharding import choice, rules
from minitorch_dist.parallel.sharding.running import operand
from minitorch_dist.parallel.tensor import parallelize_module

from .annotate_cases import apart, values

# ---------------------------------------------------------------- bytes

def matmul_bytes(axes, cuts, dtype="float64"):
    """[({(collective, axis): bytes of this rank, forward and backward}, what the choice expected, the result's layout)]
    for x (8, 12) @ w (12, 16), the result settled; cuts: [(dims_mapping of x, of w)]."""
    mesh, found = comm.DeviceMesh(**axes), []
    for cut in cuts:
        x, w = (a.mesh_split(values(s, i).astype(dtype), mesh, dims).requires_grad_()
                for i, (s, dims) in enumerate(zip(((8, 12), (12, 16)), cut, strict=True)))
        with ledger.record() as book:
            y = (x @ w).settle()
            y.backward(values((8, 16), 3).astype(dtype))
        operands, sizes = [operand(x), operand(w)], {axis: mesh[axis].size for axis in axes}
        factors = rules.RULES["matmul"]([x.shape, w.shape], {})
        best = choice.choices("matmul", factors, operands, sizes)[0]
        found.append(({(op, axis): n for (axis, op), n in book.bytes_sent.items() if n},
                      choice.price("matmul", factors, operands, best.cuts, sizes), str(y.layout)))
    return found


def block(**options):
    mt.manual_seed(5)
    return nn.TransformerBlock(16, 4, causal=True, dtype=np.float64, **options)


def block_messages(options):
    """({annotation: {pass: {collective: (calls, bytes)}}} of one transformer block on x (4, 8, 16), the bytes of x, of
    all parameters, of the norms' parameters)."""
    mesh, found, megatron = comm.DeviceMesh(tp=-1), {}, a.megatron(block(**options))
    for name, annotations, cut in (("megatron", megatron, None), ("sequence", megatron, 1), ("data", {}, 0)):
        model = a.shard_parameters(block(**options), mesh, annotations)
        x = values((4, 8, 16), 7)
        x = (a.replicate(x, mesh) if cut is None else a.split(x, cut, mesh["tp"])).requires_grad_()
        with ledger.record() as forward:
            y = model(x).settle()
        with ledger.record() as backward:
            y.backward(values((4, 8, 16), 8))
        found[name] = {way: {op: (book.calls[key], book.bytes_sent[key]) for key in book.calls for op in key[1:]}
                       for way, book in (("forward", forward), ("backward", backward))}
    weights = sum(p.data.nbytes for p in block(**options).parameters())
    norms = sum(p.data.nbytes for name, p in block(**options).named_parameters() if "norm" in name)
    return found, x.size * 8, weights, norms


def zero():
    """Messages and bytes held of a step of two layers whose weights are cut over dp, with a batch that is larger."""
    mesh = comm.DeviceMesh(dp=-1)
    mt.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32, bias=False, dtype=np.float64), nn.Tanh(),
                          nn.Linear(32, 8, bias=False, dtype=np.float64))
    whole_bytes = sum(p.data.nbytes for p in model.parameters())
    a.shard_parameters(model, mesh, {"*": ["dp", -1]})
    optimizer = optim.Adam(model.parameters())
    with ledger.record() as book:
        mt.sum(model(a.split(values((256, 16), 2), 0, mesh["dp"])) ** 2.0).backward()
    optimizer.step()
    return ({op: book.bytes_sent[axis, op] for axis, op in book.calls}, whole_bytes,
            sum(p.data.nbytes for p in model.parameters()),
            [str(p.grad.layout) for p in a.sharded_parameters(model).values()])


# ---------------------------------------------------------------- models

VOCABULARY, LENGTH, ROUNDS = 12, 6, 2


def gpt(layers=2, **options):
    mt.manual_seed(5)
    return nn.GPT(VOCABULARY, LENGTH, layers=layers, heads=4, dim=16, dtype=np.float64, **options)


def mlp():
    mt.manual_seed(6)
    first, second, third = (nn.Linear(i, o, dtype=np.float64) for i, o in ((9, 14), (14, 10), (10, 5)))
    return nn.Sequential(first, nn.GELU(), nn.Dropout(0.3), second, nn.ReLU(), third)


def lenet():
    mt.manual_seed(7)
    return nn.lenet(dtype=np.float64)


def _further(entry):
    """An entry of a dims_mapping that cuts over dp, too, inside."""
    return "dp" if entry == -1 else (entry, "dp")


COLUMN, ROW = ["tp", -1], [-1, "tp"]
CHANNELS = {"1.weight": ["tp", -1, -1, -1], "1.bias": ["tp"], "4.weight": [-1, "tp", -1, -1],
            "8.weight": COLUMN, "8.bias": ["tp"], "10.weight": ROW}
MODELS = {      # the model, its batches' inputs and labels, and ways to annotate it: (parameters, inputs)
    "mlp": (mlp, lambda rng: (rng.standard_normal((13, 9)), rng.integers(0, 5, 13)), {
        "column, row": ({"0.weight": COLUMN, "0.bias": ["tp"], "3.weight": ROW}, [-1, -1]),
        "batch": ({}, ["dp", -1]),
        "batch, over both": ({"*.weight": [("tp", "dp"), -1], "0.bias": [("dp", "tp")]}, [("dp", "tp"), -1]),
        "batch, column": ({"0.weight": COLUMN, "5.weight": COLUMN, "5.bias": ["tp"]}, ["dp", -1]),
        "features": ({"3.weight": ["dp", "tp"]}, [-1, "dp"])}),
    "lenet": (lenet, lambda rng: (rng.standard_normal((4, 784)), rng.integers(0, 10, 4)), {
        "channels": (CHANNELS, [-1, -1]), "batch, channels": (CHANNELS, ["dp", -1])}),
    "gpt": (gpt, lambda rng: (rng.integers(0, VOCABULARY, (6, LENGTH)), rng.integers(0, VOCABULARY, (6, LENGTH))), {
        "megatron": (a.megatron(gpt()), [-1, -1]), "megatron, batch": (a.megatron(gpt()), ["dp", -1]),
        "megatron, batch, each matrix' rows over both": (
            {name: [_further(dims[0]), *dims[1:]] for name, dims in a.megatron(gpt()).items()}, ["dp", -1]),
        "sequence": (a.megatron(gpt()), [-1, "tp"]), "cut in four": (
            {"*weight": ["dp", "tp"], "*norm*": ["tp"], "*bias": ["dp"]}, ["dp", -1])}),
    "grouped gpt": (lambda: gpt(1, kv_heads=2, dropout=0.2, attention_dropout=0.3, positions="rotary", tied=False,
                                norm="rms", sinks=True, gated=True), lambda rng: (
        rng.integers(0, VOCABULARY, (6, LENGTH)), rng.integers(0, VOCABULARY, (6, LENGTH))), {
        "megatron, batch": (a.megatron(gpt(1, kv_heads=2, positions="rotary", tied=False, norm="rms", sinks=True,
                                      gated=True)),
                            ["dp", -1])}),
    "linear gpt": (lambda: gpt(1, window="linear", dropout=0.2), lambda rng: (
        rng.integers(0, VOCABULARY, (6, LENGTH)), rng.integers(0, VOCABULARY, (6, LENGTH))), {
        "megatron, batch": (a.megatron(gpt(1, window="linear")), ["dp", -1])}),
    "delta gpt": (lambda: gpt(1, window="delta", dropout=0.2), lambda rng: (
        rng.integers(0, VOCABULARY, (6, LENGTH)), rng.integers(0, VOCABULARY, (6, LENGTH))), {
        "megatron, batch": (a.megatron(gpt(1, window="delta")), ["dp", -1])}),
    "gpt of blocks": (lambda: gpt(1, window="2x2", kv_heads=2, dropout=0.2), lambda rng: (
        rng.integers(0, VOCABULARY, (6, LENGTH)), rng.integers(0, VOCABULARY, (6, LENGTH))), {
        "megatron, batch": (a.megatron(gpt(1, window="2x2", kv_heads=2)), ["dp", -1]),
        "sequence": (a.megatron(gpt(1, window="2x2", kv_heads=2)), [-1, "tp"])}),
}


def trained(model, batches, place=lambda x: x):
    """(losses and norms of the gradient, whole parameters) after a step of AdamW with clipping per batch; place:
    annotates a batch's inputs."""
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for step, (inputs, labels) in enumerate(batches):
        with backend.random_scope(3, step, len(inputs), (0, len(inputs))):
            loss = nn.cross_entropy(model(place(inputs)), labels, "sum") / labels.size
        loss.backward()
        losses += [loss.item(), optim.clip_grad_norm_(model.parameters(), 0.5)]
        optimizer.step()
        optimizer.zero_grad()
    return losses, (a.full_state_dict if isinstance(loss, a.Sharded) else nn.Module.state_dict)(model)


def models(dp, tp, chosen):
    """{(model, way): how far losses and parameters are from the dense model's}, on a mesh, of ways that match."""
    mesh, found = comm.DeviceMesh(dp=dp, tp=tp), {}
    for name, (make, batch, ways) in MODELS.items():
        ways = {way: annotation for way, annotation in ways.items() if re.search(chosen, way)}
        if not ways:
            continue
        batches = [batch(np.random.default_rng(step)) for step in range(ROUNDS if name != "lenet" else 1)]
        losses, state = trained(make(), batches)
        for way, (annotations, dims) in ways.items():
            model = make()
            for p in list(model.parameters())[::2]:
                p.requires_grad_(False)
            model = copy.deepcopy(a.shard_parameters(model, mesh, annotations))
            for p in model.parameters():        # of which the frozen ones know their other parts, too, and all copies
                p.requires_grad_()
            cut_losses, cut_state = trained(model, batches, lambda x, dims=dims: a.mesh_split(x, mesh, dims))
            assert list(state) == list(cut_state)
            found[name, way] = max(apart(np.array(cut_losses), np.array(losses)),
                                   *(apart(cut_state[key], state[key]) for key in state))
    return found


def states():
    """Whether a cut model's whole state is the dense one's, also after other values were written into it; and its
    text. What it generates."""
    mesh = comm.DeviceMesh(dp=1, tp=-1)
    dense, model = gpt(), a.shard_parameters(gpt(), mesh, a.megatron(gpt()))
    def holds(state):
        whole = a.full_state_dict(model)
        return all((whole[k] == v).all() for k, v in state.items())
    same = [holds(dense.state_dict())]
    changed = {k: v + 1 for k, v in dense.state_dict().items()}
    a.load_full_state_dict(model, changed)
    same.append(holds(changed))
    dense.load_state_dict(changed)
    tokens = np.array([[1, 2], [3, 0]])
    same.append((model.generate(tokens, 3, 0) == dense.generate(tokens, 3, 0)).all())
    return same, model.embed.weight.local.shape, type(model.embed.weight).__name__


def on_gpu():
    """How far training with annotations on the stand-in for a GPU is from the host's; where parameters live; whether
    the model then goes on from tokens of the host with those that a whole one does."""
    from tests.device.fake_cupy import installed
    batches = [MODELS["gpt"][1](np.random.default_rng(step)) for step in range(2)]
    options, tokens = {"kv_heads": 2, "dropout": 0.2, "tied": False}, np.array([[1, 2], [3, 0]])
    dense = gpt(1, **options)
    losses, state = trained(dense, batches)
    with warnings.catch_warnings(), installed():
        mesh, model = comm.DeviceMesh(dp=1, tp=-1), gpt(1, **options).to("cuda")
        a.shard_parameters(model, mesh, a.megatron(model))
        cut_losses, cut_state = trained(model, batches, lambda x: a.split(x, 0, mesh["dp"]))
        places = {p.device for p in model.parameters()}
        goes_on = backend.to(model.generate(tokens, 3, 0), "cpu")
        x = values((4, 6), 7)
        largest = mt.topk(a.split(mt.tensor(x, device="cuda"), 0, mesh["tp"]), 2, 1)[0].full().cpu().numpy()
        assert (largest == np.sort(x, 1)[:, :-3:-1]).all()
    far = max(apart(np.array(cut_losses), np.array(losses)), *(apart(cut_state[k], state[k]) for k in state))
    return far, places, (goes_on == dense.generate(tokens, 3, 0)).all()


# ---------------------------------------------------------------- what can't be

def errors():
    """{what is wrong: (type, message)}."""
    world, found = comm.world(), {}
    mesh, other = comm.DeviceMesh(dp=1, tp=-1), comm.DeviceMesh(tp=-1)
    flat = comm.DeviceMesh(all=-1)

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    x = np.arange(24.0).reshape(4, 6)
    cut = a.split(x, 0, mesh["tp"])
    attempt("dimension", lambda: a.split(x, 2, mesh["tp"]))
    attempt("mapping", lambda: a.mesh_split(x, mesh, [0]))
    attempt("axis", lambda: a.mesh_split(x, mesh, [2, -1]))
    attempt("name", lambda: a.mesh_split(x, mesh, ["ep", -1]))
    attempt("twice", lambda: a.mesh_split(x, mesh, [1, 1]))
    attempt("twice in one", lambda: a.mesh_split(x, mesh, [("tp", "dp", "tp"), -1]))
    attempt("inner sections", lambda: a.mesh_split(x, mesh, [("dp", ("tp", (2, 2))), -1]))
    attempt("whole inside", lambda: a.mesh_split(x, mesh, [("tp", -1), -1]))
    attempt("a mesh", lambda: a.split(x, 0, mesh))
    attempt("an axis", lambda: a.mesh_split(x, mesh["tp"], [0, -1]))
    attempt("a list", lambda: a.split([1, 2], 0, mesh["tp"]))
    attempt("a name", lambda: a.mesh_split(x, mesh, "tp"))
    attempt("no layout", lambda: cut.redistribute(["tp", -1]))
    attempt("no placement", lambda: a.Layout(2, {"tp": 0}))
    attempt("a parameter", lambda: optim.SGD([a.split(x, 0, mesh["tp"])], lr=0.1))
    attempt("one section", lambda: a.mesh_split(x, mesh, [("tp", (4,)), -1]))
    attempt("a fraction", lambda: a.Shard(0, (2.0, 2.0)))
    attempt("a flag", lambda: a.mesh_split(x, mesh, [True, -1]))
    attempt("no flag", lambda: a.mesh_split(x, mesh, [False, -1]))
    attempt("another mesh", lambda: cut.detach().requires_grad_().backward(a.split(x, 1, other["tp"])))
    attempt("too few", lambda: a.split(x[:1], 0, mesh["tp"]))
    attempt("sections", lambda: a.mesh_split(x, mesh, [("tp", (1, 3)), -1]))
    attempt("sum", lambda: cut.redistribute(a.Layout(2, {"tp": a.SUM})))
    attempt("same axis", lambda: cut + a.split(x, 0, other["tp"]))
    attempt("same ranks", lambda: cut @ a.split(x.T, 1, flat["all"]))
    attempt("no rule", lambda: bind(Primitive("unheard", np.sin, listed=False), (cut,)))
    attempt("index", lambda: cut[np.array([0, 4])])
    attempt("numbers", lambda: mt.embedding(a.split(np.array([0, 1, 2, 3]), 0, mesh["tp"]), mt.tensor(x)))
    attempt("no part", lambda: mt.embedding(a.split(np.array([9, 9]), 0, mesh["tp"]), a.replicate(x, mesh)))
    attempt("assignment", lambda: cut.__setitem__(0, 1.0))
    attempt("shapes", lambda: cut @ a.replicate(x, mesh))
    attempt("part as large as", lambda: cut + a.replicate(x[:2], mesh))
    attempt("pattern", lambda: a.shard_parameters(mlp(), mesh, {"7.weight": COLUMN}))
    attempt("annotation", lambda: a.shard_parameters(mlp(), mesh, {"0.weight": ["tp"]}))
    mt.manual_seed(world.rank)
    odd = nn.Linear(4, 4)
    attempt("values", lambda: a.shard_parameters(odd, mesh, {"weight": COLUMN}))
    attempt("ranks differ", lambda: a.shard_parameters(mlp(), mesh, {"0.weight": COLUMN if world.rank else ROW}))
    late = mlp()
    optim.SGD(late.parameters(), lr=0.1)
    attempt("late", lambda: a.shard_parameters(late, mesh, {"0.weight": COLUMN}))
    partial = a.Layout(2, {"tp": a.SUM})
    attempt("leaf", lambda: a.mesh_split(x, mesh, partial).requires_grad_())
    attempt("parameter", lambda: a.shard_parameters(mlp(), mesh, {"0.weight": partial}))
    attempt("one rank", lambda: a.shard_parameters(mlp(), mesh, {"0.weight" if world.rank else "wight": COLUMN}))
    flags = mlp()
    flags[0].weight.requires_grad_(world.rank == 0)
    attempt("frozen", lambda: a.shard_parameters(flags, mesh, {}))
    attempt("again", lambda: a.shard_parameters(a.shard_parameters(mlp(), mesh, {}), mesh, {}))
    attempt("no dict", lambda: a.shard_parameters(mlp(), mesh, {} if world.rank else ["0.weight"]))
    attempt("sharded fully", lambda: fully_shard(a.shard_parameters(mlp(), mesh, {}), mesh["tp"]))
    attempt("in parallel", lambda: parallelize_module(a.shard_parameters(mlp(), mesh, {}), mesh["tp"], {"0": "column"}))
    attempt("in context", lambda: context_parallel(a.shard_parameters(nn.TransformerBlock(4, 2), mesh, {}), mesh["tp"]))
    attempt("other shape", lambda: a.load_full_state_dict(
        a.shard_parameters(mlp(), mesh, {"*.weight": COLUMN}), mlp().state_dict() | {"0.weight": np.ones((7, 9))}))
    attempt("wrapped", lambda: DistributedDataParallel(a.shard_parameters(mlp(), mesh, {}), mesh["tp"]))
    attempt("uncut", lambda: a.full_state_dict(mlp()))
    attempt("missing", lambda: a.load_full_state_dict(a.shard_parameters(mlp(), mesh, {}), {}))
    attempt("label", lambda: nn.cross_entropy(cut, a.split(np.array([0, 1, 2, 9]), 0, mesh["tp"])))
    attempt("returned", lambda: mt.grad(lambda v: mt.sum(a.split(v, 0, mesh["tp"]) ** 2))(x))
    attempt("linearized", lambda: mt.linearize(lambda v: a.split(v, 0, mesh["tp"]) ** 2, x))
    attempt("argument", lambda: mt.jvp(lambda s: mt.sum(s), (cut,), (x,)))
    attempt("by hand", lambda: mt.custom_vjp(lambda s: s)(cut))
    attempt("layout", lambda: cut.redistribute(a.Layout(2, {"ep": a.SUM})))
    attempt("dimensions", lambda: cut[0, 0, 0])
    attempt("no scalar", lambda: a.split(np.ones(2), 0, mesh["tp"]).requires_grad_().backward())
    attempt("cotangent", lambda: cut.detach().requires_grad_().backward(np.ones((3, 6))))
    attempt("pickle", lambda: pickle.dumps(cut))
    attempt("disagree", lambda: a.split(x, world.rank % 2, mesh["tp"]).full())
    return found
