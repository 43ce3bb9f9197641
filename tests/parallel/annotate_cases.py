"""What the ranks do in the tests of annotations. What must hold is checked by the parent process."""

import itertools

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger
from minitorch_dist.autodiff.ops.attention import greatest_scores
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.parallel.sharding import annotate as a
from minitorch_dist.parallel.sharding import rules
from minitorch_dist.parallel.sharding.moves import moves as schedule
from tests.autodiff.samples import SAMPLES


def values(shape, *key):
    return np.random.default_rng(list(key)).standard_normal(shape)


def apart(x, y):
    """The greatest difference, relative to y's greatest value."""
    assert x.shape == y.shape, (x.shape, y.shape)
    return float(np.abs(x - y).max() / max(1.0, np.abs(y).max())) if x.size else 0.0


def whole(x):
    return x.full() if isinstance(x, a.Sharded) else x


# ---------------------------------------------------------------- ops

def of_ranks(op):
    """Whether it sends messages itself."""
    written = getattr(op, "definition", None) or op.forward
    return "minitorch_dist.parallel" in getattr(written, "__module__", "")


def op_table(uneven, axes):
    """({sample: the greatest difference of value and gradients from the dense run's}, how many layouts were tried, ops
    that have no rule): each dimension of each argument cut over all ranks, of one or more axes; uneven: of every second
    sample those that they can't share equally."""
    mesh, found, count = comm.DeviceMesh(**axes), {}, 0
    world = mesh[tuple(axes)]
    ranks = {axis: (mesh.coords[axis], mesh[axis].size) for axis in axes}
    for sample in SAMPLES[::2] if uneven else SAMPLES:
        leaves = [mt.tensor(x, requires_grad=True) for x in sample.args]
        y = sample.function(*leaves)
        u = values(y.shape, 1)
        y.backward(mt.tensor(u))
        cuts = [(i, dim) for i, x in enumerate(sample.args) for dim in range(np.ndim(x))
                if x.shape[dim] >= world.size and (not uneven or x.shape[dim] % world.size)]
        worst, count = found.get(sample.id, 0.0), count + len(cuts)
        for i, dim in cuts:
            twins = [a.split(x, dim, world).requires_grad_() if k == i else mt.tensor(x, requires_grad=True)
                     for k, x in enumerate(sample.args)]
            try:
                z = a.as_sharded(sample.function(*twins)).settle()
                z.backward(u)
                # This rank's parts: to gather them costs more time than all else.
                worst = max([worst, *(apart(lower(s.local), cut_by_hand(x.numpy(), s.layout, ranks))
                                      for s, x in [(z, y), *((a.as_sharded(t.grad), x.grad)
                                                             for t, x in zip(twins, leaves, strict=True))])])
            except Exception as error:
                raise AssertionError(f"{sample.id}, dimension {dim} of argument {i} cut") from error
        found[sample.id] = worst
    return found, count, sorted(name for name in mt.OPS.keys() - rules.RULES.keys() if not of_ranks(mt.OPS[name]))


# What a random program is made of: (name, how many values it takes, f, whether shapes fit).
STEPS = [
    ("add", 2, lambda x, y: x + y, lambda s, t: _broadcasts(s, t)),
    ("mul", 2, lambda x, y: x * y, lambda s, t: _broadcasts(s, t)),
    ("matmul", 2, lambda x, y: x @ y * 0.3,
     lambda s, t: len(s) > 1 and len(t) > 1 and s[-1] == t[-2] and s[:-2] == t[:-2]),
    ("rows", 2, lambda x, y: x @ y * 0.3, lambda s, t: len(s) == 3 and len(t) == 2 and s[-1] == t[0]),
    ("tanh", 1, mt.tanh, lambda s: True), ("scale", 1, lambda x: x * 0.7 - 0.1, lambda s: True),
    ("gelu", 1, mt.gelu, lambda s: True), ("softmax", 1, mt.softmax, lambda s: len(s) > 0),
    ("softmax 0", 1, lambda x: mt.softmax(x, 0), lambda s: len(s) > 0),
    ("norm", 1, lambda x: mt.layer_norm(x, x.shape[-1], eps=0.1), lambda s: len(s) > 0 and s[-1] > 1),
    ("transpose", 1, lambda x: mt.transpose(x), lambda s: len(s) > 1),
    ("flat", 1, lambda x: mt.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])), lambda s: len(s) > 1),
    ("parted", 1, lambda x: mt.reshape(x, (2, x.shape[0] // 2, *x.shape[1:])), lambda s: len(s) == 2 and s[0] % 2 == 0),
    ("sum 0", 1, lambda x: mt.sum(x, 0), lambda s: len(s) > 1), ("mean", 1, lambda x: x - mt.mean(x, -1, True),
                                                                 lambda s: len(s) > 0),
    ("max", 1, lambda x: mt.max(x, -1, keepdims=True) + x, lambda s: len(s) > 0),
    ("half", 1, lambda x: x[..., :x.shape[-1] // 2], lambda s: len(s) > 0 and s[-1] > 3),
    ("twice", 2, lambda x, y: mt.concatenate([x, y], -1), lambda s, t: len(s) > 0 and s == t and s[-1] < 10),
    ("picked", 1, lambda x: x[np.array([1, 0, -1, 1])], lambda s: len(s) > 1 and s[0] > 1),
    ("cumsum", 1, lambda x: mt.cumsum(x, 0) * 0.2, lambda s: len(s) > 0),
]


def _broadcasts(s, t):
    try:
        return np.prod(np.broadcast_shapes(s, t), dtype=int) <= 400
    except ValueError:
        return False


def program(rng, shapes, length):
    """A random program as data: [(step, the places of its values)]."""
    shapes, lines = list(shapes), []
    while len(lines) < length:
        step = STEPS[rng.integers(len(STEPS))]
        places = [int(rng.integers(len(shapes))) for _ in range(step[1])]
        if step[3](*(shapes[i] for i in places)):
            lines.append((step, places))
            shapes.append(tuple(step[2](*(mt.tensor(np.zeros(shapes[i])) for i in places)).shape))
    return lines


def run(lines, inputs, again=lambda x: x):
    """The sum of all that nobody used, each weighed; `again` may annotate each value once more."""
    made, used = list(inputs), set()
    for (_, _, f, _), places in lines:
        made.append(again(f(*(made[i] for i in places))))
        used.update(places)
    left = [mt.sum(mt.sin(x)) * (i + 1.0) for i, x in enumerate(made) if i not in used]
    total = left[0]
    for x in left[1:]:
        total = total + x
    return total


def random_layout(rng, shape, mesh):
    """A legal dims_mapping; two axes may cut one dimension, either of them inside of the other's parts."""
    dims, axes = [()] * len(shape), [axis for axis in mesh.axes if rng.random() < 0.7]
    for axis in rng.permutation(axes).tolist():
        free = [i for i, extent in enumerate(shape)
                if extent >= mesh[axis].size * np.prod([mesh[other].size for other in dims[i]])]
        if free:
            dims[free[rng.integers(len(free))]] += (axis,)
    return [axes or -1 for axes in dims]


def random_programs(first, count, axes):
    """(the greatest difference from the dense run, what differed most, how many bytes were sent)."""
    mesh, worst, sent = comm.DeviceMesh(**axes), (0.0, ""), 0
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        shapes = [(6, 4), (4, 8), (8, 6), (2, 6, 4), (4,)]
        lines = program(rng, shapes, 9)
        arrays = [values(s, seed, i) for i, s in enumerate(shapes)]
        leaves = [mt.tensor(x, requires_grad=True) for x in arrays]
        dense = run(lines, leaves)
        dense.backward()
        twins = [mt.tensor(x, requires_grad=True) for x in arrays]

        def again(x, rng=rng):
            return a.mesh_split(x, mesh, random_layout(rng, x.shape, mesh)) if rng.random() < 0.2 else x
        with ledger.record() as book:
            total = run(lines, [a.mesh_split(t, mesh, random_layout(rng, t.shape, mesh)) if rng.random() < 0.8 else t
                                for t in twins], again)
            differences = [apart(np.asarray(whole(total).item()), np.asarray(dense.item()))]
            total.backward()
        sent += book.total_bytes_sent()
        differences += [0.0 if x.grad is None else apart(t.grad.numpy(), x.grad.numpy())
                        for t, x in zip(twins, leaves, strict=True)]
        worst = max(worst, (max(differences), f"seed {seed}: {[(step[0], places) for step, places in lines]}"))
    return (*worst, sent)


def transforms():
    """How far forward mode, reverse mode and a Hessian of a function that cuts its argument are from the dense ones."""
    mesh = comm.DeviceMesh(tp=-1)
    w = values((4, 6), 1)

    def f(x, cut=True):
        x, v = (a.split(x, 1, mesh["tp"]), a.mesh_split(w, mesh, [0, -1])) if cut else (x, w)
        y = mt.softmax(mt.tanh(x @ v))
        return whole(mt.sum(y * y * y))
    x, t = values((3, 4), 2), values((3, 4), 3)

    def dense(x):
        return f(x, False)
    found = [apart(np.asarray(lower(of(f))), np.asarray(lower(of(dense)))) for of in (
        lambda f: mt.grad(f)(x), lambda f: mt.jvp(f, (x,), (t,))[1], lambda f: mt.hvp(f, x, t))]

    def bias(b, cut=True):      # reverse over reverse: b becomes a summand, and so does the inner gradient's cotangent
        z = a.split(x, 1, mesh["tp"]) @ a.split(w, 0, mesh["tp"]) if cut else x @ w
        return whole(mt.sum(mt.sin(z + b)))

    def constants(x, cut=True):
        s = a.split(x, 1, mesh["tp"]) if cut else x
        return whole(mt.sum(s + mt.stop_gradient(s) * s + mt.where(s > 0, 1.0, 0.0) * mt.stop_gradient(2.0 * s) * s))
    b = values((6,), 5)
    for h, at in (bias, b), (constants, x):
        pair = [mt.grad(lambda z, f=f: mt.sum(mt.grad(f)(z) ** 2) + f(z))(at) for f in (
            h, lambda z, h=h: h(z, False))]
        found.append(apart(*(np.asarray(lower(g)) for g in pair)))
    return found


def inside():
    """Layouts of x (8, 8) that is cut again and again, on paper."""
    mesh, x = a.paper_mesh(dp=2, tp=2), values((8, 8), 1)
    both, dp, tp = mesh["dp", "tp"], mesh["dp"], mesh["tp"]
    return [str(y.layout) for y in (
        a.split(x, 0, both), a.split(a.split(x, 0, dp), 0, tp), a.split(a.split(x, 0, tp), -2, dp),
        a.split(a.split(x, 0, both), 0, dp), a.split(a.split(x, 0, tp), 0, both), a.split(a.split(x, 0, both), 1, dp),
        a.mesh_split(x, mesh, [(0, 1), -1]), a.mesh_split(values((2, 16), 2), mesh, [-1, (("tp", (4, 12)), "dp")]),
        a.mesh_split(a.split(x, 0, both), mesh, ["tp", ["dp"]]))]


def explained():
    """What explain prints of a layer of a network, and that a value nobody looks at isn't noted."""
    mesh = comm.DeviceMesh(tp=-1)
    x, w, v = a.replicate(values((4, 6), 1), mesh), a.mesh_split(values((6, 8), 2), mesh, [-1, 0]), \
        a.mesh_split(values((8, 6), 3), mesh, [0, -1])
    w.requires_grad_()

    def f(x):
        z = mt.gelu(x @ w) @ v
        loss = mt.sum(z * z)
        loss.backward()
        return loss
    page = a.explain(f, x)
    return str(page), len(page.notes), page.rest


def unequal(axes):
    """How far tanh(x @ w + z), of x (7, 5), w (5, 8) and z (7, 8), each cut along each dimension or not over all axes,
    and its gradients are from the dense ones."""
    mesh, shapes, worst = comm.DeviceMesh(**axes), ((7, 5), (5, 8), (7, 8)), 0.0
    made = {}
    for cut in itertools.product((None, 0, 1), repeat=3):
        leaves = [mt.tensor(values(s, i), requires_grad=True) for i, s in enumerate(shapes)]
        x, w, z = (t if dim is None else a.split(t, dim, mesh[tuple(axes)])
                   for t, dim in zip(leaves, cut, strict=True))
        y = whole(mt.tanh(x @ w + z))
        y.backward(mt.tensor(values((7, 8), 4)))
        made[cut] = [y.numpy(), *(t.grad.numpy() for t in leaves)]
        worst = max([worst, *(apart(*pair) for pair in zip(made[cut], made[None, None, None], strict=True))])
    return worst


def looked_at():
    """The gradient of x of a product that somebody looks at under no_grad while its sum is pending, and the dense one;
    how many all-reduces three uses of the product cost."""
    mesh, (x, w) = comm.DeviceMesh(tp=-1), (values((4, 6), 1), values((6, 5), 2))
    leaf = mt.tensor(x, requires_grad=True)
    z = a.split(leaf, 1, mesh["tp"]) @ a.mesh_split(w, mesh, [0, -1])
    with mt.no_grad():
        mt.tanh(z)
        pending = str(z.layout)
    with ledger.record() as book:
        mt.sum(z * z + mt.exp(z)).backward()
    y = x @ w
    return apart(leaf.grad.numpy(), (2 * y + np.exp(y)) @ w.T), pending, book.calls["tp", "all_reduce"]


def extrema():
    """Of values without a gradient, along what is cut: what the ranks make of max, min, any and all, and NumPy. Some
    are NaN, on another rank in each column."""
    mesh, x = comm.DeviceMesh(tp=-1), values((5, 6), 4)
    x[0, 0] = x[4, 1] = np.nan
    given, short = x.copy(), x.astype(np.float16)
    cut, found = a.split(given, 0, mesh["tp"]), []
    given[:] = 0        # whose values were taken
    for name, made, dense in (("max", cut, x), ("min", -cut, -x), ("any", cut > 1.5, x > 1.5),
                              ("all", cut < 1.5, x < 1.5), ("max", a.split(x[1:4], 0, mesh["tp"]), x[1:4]),
                              ("min", a.split(short, 0, mesh["tp"]), short)):
        for axis in (None, 0, 1):
            with ledger.record() as book:
                y = getattr(mt, name)(made, axis)
            found.append((name, axis, y.numpy(), getattr(np, name)(dense, axis), book.total_bytes_sent()))
    return found


def scores():
    """[(what was cut, the greatest scores of grouped heads, all of them by NumPy, bytes sent)], each dimension cut."""
    mesh, found = comm.DeviceMesh(tp=-1), []
    q, k = values((2, 4, 6, 4), 1), values((2, 2, 6, 4), 2)
    every = np.einsum("bhtd,bhsd->bhts", q, np.repeat(k, 2, 1)) / 2
    for causal in (False, True):
        dense = np.where(np.tri(6) > 0, every, -np.inf) if causal else every
        for which, dim in itertools.product("qk", range(4)):
            one, other = ((a.split(x, dim, mesh["tp"]) if which == name else x) for name, x in (("q", q), ("k", k)))
            with ledger.record() as book:
                y = greatest_scores(one, other, is_causal=causal)
            found.append(((which, dim, causal), y.numpy(), dense.max(axis=(0, 2, 3)), book.total_bytes_sent()))
    return found


def narrow():
    """Products whose parts are summed, as float64, and NumPy's: of bools, of integers that wrap, of float16 with the
    gradient of a weight, which is a sum as well; and rows of bools, of which each rank has some."""
    mesh, x, w = comm.DeviceMesh(tp=-1), values((4, 6), 1), values((6, 3), 2)
    found = []
    for p, q in ((x > 0, w < 9), ((x * 60).astype(np.int8), (w * 60).astype(np.int8))):
        found.append(((a.split(p, 1, mesh["tp"]) @ a.split(q, 0, mesh["tp"])).astype(np.float64).numpy(), p @ q))
    p, q = x.astype(np.float16), w.astype(np.float16)
    found.append(((a.split(p, 1, mesh["tp"]) @ a.split(q, 0, mesh["tp"])).numpy(), p @ q))
    weight = mt.tensor(q, requires_grad=True)
    mt.sum(a.split(p, 0, mesh["tp"]) @ weight).backward()
    found.append((weight.grad.numpy(), p.T @ np.ones((4, 3), np.float16)))
    found.append((mt.take(a.split(x > 0, 0, mesh["tp"]), np.array([3, 0, -4, 2]), 0).numpy(), (x > 0)[[3, 0, 0, 2]]))
    return found


def orders_of_16_bits():
    """[(got, NumPy's of float32)] of lines that are cut, and of such as lie on one rank each; NaN last."""
    mesh, x = comm.DeviceMesh(tp=-1), values((4, 6), 1).astype(mt.bfloat16)
    x[1, 2] = x[3, 0] = np.nan
    exact, found = x.astype(np.float32), []
    for dim in (0, 1):
        cut, order = a.split(x, dim, mesh["tp"]), np.argsort(exact, 0, kind="stable")
        found += [(mt.argsort(cut, 0).numpy(), order), (mt.topk(cut, 2, 0, largest=False)[1].numpy(), order[:2])]
    return found


def edges():
    """{what: (got, expected)} on 2 ranks: what is empty, sections where two factors meet, cotangents on other axes."""
    mesh, x = comm.DeviceMesh(dp=1, tp=-1), values((12, 2), 1)
    none = a.mesh_split(np.zeros((0, 4)), mesh, ["dp", "tp"])
    leaf = mt.tensor(x, requires_grad=True)
    (a.split(leaf, 0, mesh["tp"]) * 2.0).backward(a.split(x, 0, mesh["dp"]))
    scalar = mt.tensor(3.0, np.float64, requires_grad=True)
    chosen = mt.where(a.split(x, 0, mesh["tp"]) > 0, scalar, 0.5)      # of which the condition alone is cut
    (mt.sum(chosen) * 2.0).backward()
    return {"chosen": (chosen.numpy(), np.where(x > 0, 3.0, 0.5)), "chosen lies": (str(chosen.layout), "(tp, ·)"),
            "chosen, gradient": (scalar.grad.numpy(), 2.0 * (x > 0).sum()),
            "empty": (a.split(x, 1, mesh["tp"])[1:1].full().numpy(), x[1:1]),
            "product": ((none @ a.replicate(np.ones((4, 3)), mesh)).numpy(), np.zeros((0, 3))),
            "sum": (mt.sum(none, 0).numpy(), np.zeros(4)),
            "sections": (mt.reshape(a.mesh_split(x, mesh, [("tp", (3, 9)), -1]), (4, 3, 2)).numpy(),
                         x.reshape(4, 3, 2)),
            "sections of another type": (a.mesh_split(x, mesh, [("tp", tuple(np.array([4, 8]))), -1]).numpy(), x),
            "one part": (mt.concatenate(mt.split(a.split(x, 0, mesh["tp"]), 1), 0).numpy(), x),
            "one part lies": (str(mt.split(a.split(x, 0, mesh["tp"]), 1)[0].layout), "(tp, ·)"),
            "cotangent": (leaf.grad.numpy(), 2 * x)}


def masks():
    """What dropout makes of ones that are cut, brought together, and of whole ones."""
    mesh, ones = comm.DeviceMesh(tp=-1), np.ones((6, 10))
    made = []
    for x in (a.split(ones, 1, mesh["tp"]), mt.tensor(ones)):
        with backend.random_scope(3, 1, 6, (0, 6)):
            made.append(whole(mt.dropout(x, 0.4)).numpy().copy())
    return made


def moves(axes, shape, step):
    """How far values and gradients are from the whole one after going from each layout to each other (each `step`-th of
    all pairs), which parts weren't those that NumPy cuts, how many pairs there were; [what a rank has sent, what it was
    to send] of each."""
    mesh, n = comm.DeviceMesh(**axes), next(iter(axes.values()))
    x, u = values(shape, 1), values(shape, 2)
    parts = {dim: tuple(len(part) for part in np.split(np.arange(shape[dim]), [shape[dim] // n])) for dim in (0, 2)}
    choices = [a.WHOLE, a.SUM, *map(a.Shard, range(3)), *(a.Shard(dim, parts[dim]) for dim in parts)]
    ranks = {axis: (mesh.coords[axis], mesh[axis].size) for axis in mesh.axes}
    everywhere = [dict(zip(axes, zip(at, axes.values(), strict=True), strict=True))
                  for at in itertools.product(*map(range, axes.values()))]
    layouts = [layout for placements in itertools.product(choices, repeat=len(axes))
               for layout in [a.Layout(3, dict(zip(axes, placements, strict=True)))]
               if all(cut_by_hand(x, layout, at).size for at in everywhere)]
    pairs = [(old, new) for old, new in itertools.product(layouts, repeat=2)
             if not set(new.pending) & old.shards.keys()][::step]
    worst, wrong, sent = 0.0, [], []
    for old, new in pairs:
        leaf = mt.tensor(x, requires_grad=True)
        start = a.replicate(leaf, mesh).redistribute(a.Layout(3, old.shards))
        if old.pending:     # a sum of as many equal parts as there are ranks
            n = np.prod([mesh[axis].size for axis in old.pending])
            start = a.Sharded(start.local / float(n), shape, old, start.comms)
        with ledger.record() as book:
            moved = start.redistribute(new)
        target = {axis: new[axis] for axis in axes}
        sent.append((book.total_bytes_sent(), sum(move.sent(x.nbytes, start.sizes, False) for move in schedule(
            shape, old, target, start.sizes))))
        if not new.pending and not np.allclose(moved.local.numpy(), cut_by_hand(x, new, ranks), rtol=1e-14):
            wrong.append(f"{old} -> {new}")
        y = moved.full()
        y.backward(mt.tensor(u))
        worst = max(worst, apart(y.numpy(), x))
        if not old.pending:
            worst = max(worst, apart(leaf.grad.numpy(), u))
    return worst, wrong, len(pairs), sent


def cut_by_hand(x, layout, ranks):
    """A rank's part of x: what it has of each dimension by all axes that cut it."""
    for dim in range(x.ndim):
        rows = np.arange(x.shape[dim])
        for axis, p in layout.shards.items():
            if p.dim == dim:
                rank, n = ranks[axis]
                sections = np.split(np.arange(x.shape[dim]), np.cumsum(p.sections)[:-1]) if p.sections else [
                    np.arange(x.shape[dim])]
                rows = np.intersect1d(rows, np.concatenate(
                    [s[len(s) * rank // n:len(s) * (rank + 1) // n] for s in sections]))
        x = np.take(x, rows, dim)
    return x
