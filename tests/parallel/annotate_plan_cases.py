"""What the ranks do in the tests of plans: plan on paper, and run what was planned."""

import itertools

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn
from minitorch_dist.parallel.sharding import annotate as a

from .annotate_cases import values
from .annotate_model_cases import LENGTH, VOCABULARY, block, gpt


def mlp(sizes=(6, 20, 10), dtype=np.float64):
    mt.manual_seed(6)
    first, second = (nn.Linear(i, o, dtype=dtype) for i, o in itertools.pairwise(sizes))
    return nn.Sequential(first, nn.GELU(), second)


def texts(layouts):
    return {name: str(layout) for name, layout in layouts.items()}


def megatrons(n):
    """[(the annotations that a plan finds, those of Megatron, its bytes, of x)] of an MLP and of a transformer block,
    on n ranks."""
    mesh, found = a.paper_mesh(tp=n), []
    column_row = {"0.weight": ["tp", -1], "0.bias": ["tp"], "2.weight": [-1, "tp"]}
    for make, annotations, shape in ((lambda: mlp((12, 48, 12)), column_row, (32, 12)),
                                     (block, a.megatron(block()), (4, 8, 16))):
        x = a.replicate(values(shape, 1), mesh).requires_grad_()
        plan = a.plan(make(), mesh, "tp", x, out=[-1] * len(shape))
        model = a.shard_parameters(make(), mesh, annotations)
        wanted = {name: p.layout for name, p in a.sharded_parameters(model).items() if p.layout.placements}
        found.append((texts(plan.annotations), texts(wanted), plan.nbytes, x.size * 8))
    return found


def exhaustive(n):
    """[(what a plan says that its annotations send, the least that any do send)] of an MLP, on paper, run once with
    each of all annotations there are; for inputs and results that lie differently."""
    mesh, found = a.paper_mesh(tp=n), []
    for batch, cut, out in ((4, -1, None), (60, 0, [-1, -1]), (60, 0, None), (60, 1, ["tp", -1]), (60, -1, [-1, -1])):
        x = a.mesh_split(values((batch, 6), 1), mesh, ["tp" if dim == cut else -1 for dim in (0, 1)]).requires_grad_()
        plan = a.plan(mlp(), mesh, "tp", x, out=out)
        ways = itertools.product(([0], [1]), ([], [0]), ([0], [1]), ([], [0]))
        names, sent = [name for name, _ in mlp().named_parameters()], []
        for way in ways:
            model = a.shard_parameters(mlp(), mesh, {name: a.Layout(2 - name.endswith("bias"), {"tp": a.Shard(*dim)})
                                                     for name, dim in zip(names, way, strict=True) if dim})
            with ledger.record() as book:
                y = model(x).settle() if out is None else a.mesh_split(model(x), mesh, out)
                y.backward(a.Sharded(mt.zeros(y.local.shape, dtype=np.float64), y.shape, y.layout, y.comms))
            sent.append(book.total_bytes_sent())
        found.append((sum(plan.nbytes), min(sent), len(set(sent))))
    return found


def _without_gradients(model, x):
    with mt.no_grad():
        return model(x)


def _in_16_bits(model, x):
    with mt.autocast("float16"):
        return model(x)


COUNTED = {     # what runs, with how many arguments x, or with labels; what lies on dp already
    "same twice": (lambda model, x, y: model(x) + model(y), "x x", {}),
    "no gradients": (_without_gradients, "x", {}), "16 bits": (_in_16_bits, "x", {}),
    "labels": (lambda model, x, y: nn.cross_entropy(model(x), y, "sum"), "x labels", {}),
    "a mask": (lambda model, x: mt.where(x > 0, model(x), 0.0), "x", {}),
    "a constant": (lambda model, x: model(mt.stop_gradient(mt.tanh(x))), "x", {}),
    "beside": (lambda model, x: model(x), "x", {"*.weight": ["dp", -1]}),
}


def counted(axes):
    """{what: (bytes that a plan foretells, bytes that its annotations send on paper)}, forward and backward, of an MLP
    with the batch over dp; and the latter of the best annotations of the last one that are known."""
    mesh, found = a.paper_mesh(**axes), {}

    def send(annotations, f, args, dims):
        model = a.shard_parameters(mlp((12, 48, 12), x.dtype), mesh, annotations)
        with ledger.record() as forward:
            y = a.mesh_split(f(model, *args), mesh, dims)
        with ledger.record() as backward:
            if y.requires_grad:
                y.backward(a.Sharded(mt.zeros(y.local.shape, dtype=y.dtype), y.shape, y.layout, y.comms))
        return forward.total_bytes_sent(), backward.total_bytes_sent()
    for name, (f, which, others) in COUNTED.items():
        x = a.split(values((8, 12), 1).astype(np.float32 if name == "16 bits" else np.float64), 0, mesh["dp"])
        given = {"x": x.requires_grad_(), "labels": a.split(np.arange(8), 0, mesh["dp"])}
        args, dims = [given[arg] for arg in which.split()], [] if name == "labels" else ["dp", -1]
        plan = a.plan(mlp((12, 48, 12), x.dtype), mesh, "tp", *args, annotations=others, f=f, out=dims)
        found[name] = plan.nbytes, send(plan.annotations, f, args, dims)
    return found, send({"0.weight": [("tp", "dp"), -1], "0.bias": ["tp"], "2.weight": ["dp", "tp"]}, f, args, dims)


def loss(model, tokens):
    labels = np.random.default_rng(2).integers(0, VOCABULARY, (8, LENGTH))
    return nn.cross_entropy(model(tokens), labels, "sum")


def foretold(axes):
    """(bytes that a plan foretells, bytes that its annotations send, forward and backward; the printed plan; how far
    the loss is from the dense one) of a GPT with the batch over dp."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (8, LENGTH))
    paper, mesh = a.paper_mesh(**axes), comm.DeviceMesh(**axes)
    plan = mesh.world.broadcast_object(None if mesh.world.rank else a.plan(
        gpt(1), paper, "tp", a.split(tokens, 0, paper["dp"]), f=loss))
    model = a.shard_parameters(gpt(1), mesh, plan.annotations)
    with ledger.record() as forward:
        result = loss(model, a.split(tokens, 0, mesh["dp"])).settle()
    with ledger.record() as backward:
        result.backward()
    dense = loss(gpt(1), tokens).item()
    return plan.nbytes, (forward.total_bytes_sent(), backward.total_bytes_sent()), str(plan), result.item() - dense


def on_paper(n):
    """What explain prints of a block on a mesh of n ranks on paper, and of n ranks."""
    printed = []
    for mesh in (a.paper_mesh(tp=n), comm.DeviceMesh(tp=-1)):
        model = a.shard_parameters(block(), mesh, a.megatron(block()))
        x = a.split(values((4, 8, 16), 1), 1, mesh["tp"]).requires_grad_()
        printed.append(str(a.explain(lambda model=model, x=x: mt.sum(model(x)).backward())))
    return printed


def errors():
    """{what is wrong: (type, message)}."""
    paper, found = a.paper_mesh(dp=2, tp=2), {}
    x = a.split(values((4, 6), 1), 0, paper["dp"])

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    attempt("real", lambda: a.plan(mlp(), comm.DeviceMesh(tp=-1), "tp", values((4, 6), 1)))
    attempt("axis", lambda: a.plan(mlp(), paper, "pp", x))
    attempt("mesh", lambda: a.plan(mlp(), paper["tp"], "tp", x))
    attempt("annotated", lambda: a.plan(mlp(), paper, "tp", x, annotations={"0.bias": ["tp"]}))
    attempt("detached", lambda: a.plan(mlp(), paper, "tp", x, f=lambda model, x: model(x.detach())))
    attempt("full", lambda: a.plan(mlp(), paper, "tp", x, f=lambda model, x: model(x).full()))
    attempt("item", lambda: a.plan(mlp(), paper, "tp", x, f=lambda model, x: model(x) * mt.sum(model(x)).item()))
    attempt("nothing", lambda: a.plan(mlp(), paper, "tp", x, f=lambda model, x: []))
    attempt("parameter", lambda: a.plan(mlp(), paper, "tp", x, f=lambda model, x: model[0].weight))
    attempt("nobody", lambda: a.paper_mesh(tp=-1))
    attempt("other mesh", lambda: a.plan(mlp(), a.paper_mesh(tp=2), "tp", a.split(x, 1, paper["tp"])))
    return found
