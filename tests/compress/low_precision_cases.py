"""What the ranks do in test_low_precision_parts: layers in few bits, of which each has a part."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.compress import convert_to_low_precision_training
from minitorch_dist.compress.formats import E2M1, E4M3, E5M2
from minitorch_dist.compress.low_precision import RECIPES, Cut, Operand, Recipe, over_ranks
from minitorch_dist.parallel.collectives import gather_from, scatter_to
from minitorch_dist.parallel.tensor import tensor_parallel as tp

KINDS = {"column": (0, False), "row": (1, False), "column, sequences": (0, True), "row, sequences": (1, True),
         "column, regather": (0, "regather")}
RECIPE = {      # and two with groups of which small matrices have several
    **RECIPES, "small": Recipe(E4M3, E5M2, (1, 4), (3, 4), "e8m0"),
    "small, 4 bits": Recipe(E2M1, E2M1, (1, 4), (4, 4), "e4m3", stochastic_rounding=True, random_hadamard=True)}
BATCH, TIME, IN, OUT = 3, 6, 11, 13


def wide(shape, *seed, power=3):
    """Numbers some of which a scale of the others' takes digits from."""
    random = np.random.default_rng(seed)
    return random.standard_normal(shape) * np.exp2(random.uniform(-power, power, shape))


def operands():
    """What is wrong with this rank's rounded parts of matrices: nothing, if they are those of the whole."""
    world, wrong = comm.world(), []
    for name, recipe in RECIPE.items():
        for form, block in ((recipe.element, recipe.block), (recipe.gradient, recipe.weight_block)):
            for axis in (0, 1):
                for how in ("shares", "runs", "one has none", "aligned"):
                    indices = parts(how, world.size)
                    extent, whole_axis = sum(map(len, indices)), 9
                    shape = (extent, whole_axis)[::1 if axis == 0 else -1]
                    x, cuts = wide(shape, 1, axis, power=6), [None, None]
                    chance = np.random.default_rng(2).random(shape, "f4") if recipe.stochastic_rounding else None
                    cuts[axis] = Cut(world, indices)
                    mine = (slice(None),) * axis + (indices[world.rank],)
                    part, other = (Operand(np.ascontiguousarray(x[mine]), form, block, recipe.scale, cuts,
                                           chance if chance is None else chance[mine]) for _ in range(2))
                    with ledger.record() as book:
                        over_ranks([part, other])
                    q, scale = part.scaled()
                    wanted, of_all = Operand(x, form, block, recipe.scale, chance=chance).scaled()
                    each = np.repeat(np.repeat(of_all, block[0] or len(x), 0), block[1] or x.shape[1], 1)
                    each = each[:len(x), :x.shape[1]][mine]
                    sent = sum(n for (_, op), n in book.calls.items())
                    bits = np.array_equal(q, wanted[mine]) and (part.spread(scale) == each).all()
                    same = np.array_equal(part.rounded(), Operand(x, form, block, recipe.scale,
                                                                  chance=chance).rounded()[mine])
                    asked = spans(indices, block[axis]) or recipe.scale == "e4m3" and world.size > 1
                    if not (bits and same and sent == asked):
                        wrong.append((name, form.name, axis, how, sent))
    return wrong


def parts(how, ranks):
    """[the indices that each rank has] of an axis."""
    if how == "shares":
        return np.array_split(np.arange(23), ranks)
    if how == "runs":       # as heads' queries, keys and values
        return [np.concatenate([np.arange(12).reshape(ranks, -1)[r], 12 + np.arange(6).reshape(ranks, -1)[r]])
                for r in range(ranks)]
    if how == "one has none":
        return [np.arange(5 * (r > 0) * (r - 1), 5 * r) for r in range(ranks)]
    return np.array_split(np.arange(384 * ranks), ranks)


def spans(indices, size):
    """Whether a group of so many has elements on several ranks, element by element."""
    owner = {}
    for rank, mine in enumerate(indices):
        for i in mine.tolist():
            owner.setdefault(i // size if size else 0, set()).add(rank)
    return len(indices) > 1 if size is None else any(len(ranks) > 1 for ranks in owner.values())


def layer(name, kind, whole=False):
    """A Linear's part in few bits; whole: all of it."""
    mt.manual_seed(7)
    axis, sequence = KINDS[kind]
    linear = nn.Linear(IN, OUT, dtype=np.float64)
    with mt.no_grad():
        linear.weight[...], linear.bias[...] = wide((OUT, IN), 2), wide((OUT,), 3)
    if whole:
        return convert_to_low_precision_training(linear, RECIPE[name])
    made = (tp.ColumnParallelLinear, tp.RowParallelLinear)[axis](linear, comm.world(), sequence_parallel=sequence)
    return convert_to_low_precision_training(made, RECIPE[name])


def through(name, kind, whole=False):
    """{y, dx, dW, db: those of the whole layer}, and the calls and bytes of forward and backward."""
    world, (axis, sequence), module = comm.world(), KINDS[kind], layer(name, kind, whole)
    x, ct = mt.tensor(wide((BATCH, TIME, IN), 4), requires_grad=True), wide((BATCH, TIME, OUT), 5)

    def inputs(x):
        return x if whole or not (axis or sequence) else scatter_to(x, world, 2 if axis else 1)

    def outputs(y):
        if whole or axis and not sequence:
            return y
        return gather_from(y, world, 1, TIME) if axis else gather_from(y, world, 2, OUT)
    part = mt.tensor(inputs(x).numpy(), requires_grad=True)
    with ledger.record() as forward:
        y = module(part)
    again = mt.tensor(y.numpy(), requires_grad=True)
    joined = outputs(again)
    joined.backward(mt.tensor(ct))
    with ledger.record() as backward:
        y.backward(again.grad)
    inputs(x).backward(part.grad)
    found = {"y": joined.numpy(), "dx": x.grad.numpy()}
    with mt.no_grad():
        for p in module.parameters():
            p[...] = p.grad
    found |= {f"d{n}": a for n, a in (tp.full_state_dict(module) if not whole else module.state_dict()).items()}
    return found, [{op: (book.calls[at, op], book.bytes_sent[at, op]) for at, op in book.calls}
                   for book in (forward, backward)]


def layers():
    """{(recipe, kind): through's}."""
    return {(name, kind): through(name, kind) for name in RECIPE for kind in KINDS
            if not (KINDS[kind][1] and TIME % comm.world().size)}


def aligned(recipe):
    """{op: (calls, bytes)} of a row- and a column-parallel layer of whose blocks each rank has whole ones."""
    world, found = comm.world(), []
    n = 128 * world.size
    for cut, n_in, n_out in ((tp.RowParallelLinear, n, 5), (tp.ColumnParallelLinear, 5, 2 * n)):
        module = convert_to_low_precision_training(cut(nn.Linear(n_in, n_out), world), recipe)
        with ledger.record() as book:
            module(np.ones((3, module.weight.shape[1]), "f4"))
            mt.grad(lambda x, w, m=module: m.product(x, w).sum(), (0, 1))(
                np.ones((3, module.weight.shape[1]), "f4"), module.weight.numpy())
        found.append({op: (n, book.bytes_sent[at, op]) for (at, op), n in book.calls.items()})
    return found


def not_finite(bad):
    """Which rows of y aren't finite, by recipe, where one rank has a bad number in row 1 of its part."""
    world, found = comm.world(), {}
    for name in RECIPE:
        linear = tp.RowParallelLinear(nn.Linear(8 * world.size, 3, dtype="f8"), world)
        module = convert_to_low_precision_training(linear, RECIPE[name])
        x = np.ones((4, 8))
        if world.rank == world.size - 1:
            x[1, 2] = bad
        lost = ~np.isfinite(module(x).numpy())
        found[name] = lost.any(1).tolist(), lost.all(1).tolist()
    return found


def trained(kind, recipe="rowwise"):
    """The parameters of a GPT after three steps, what a forward keeps, and the model's repr. kind None: of one process;
    recipe None: as it is."""
    mt.manual_seed(3)
    model, world = nn.GPT(16, 8, layers=1, heads=4, kv_heads=2, dim=24, dtype=np.float64), comm.world()
    if kind is not None:
        tp.parallelize_module(model, world, tp.plan_of(model), kind)
    if recipe is not None:
        convert_to_low_precision_training(model, recipe)
    optimizer, random = optim.SGD(model.parameters(), 0.5), np.random.default_rng(4)
    for _ in range(3):
        tokens = random.integers(0, 16, (4, 9))
        optimizer.zero_grad()
        with ledger.record(memory=True) as book:
            logits = model(tokens[:, :-1])
            kept = book.live["activation"]
            nn.cross_entropy(mt.reshape(logits, (32, 16)), tokens[:, 1:].ravel()).backward()
        optimizer.step()
    return model.state_dict() if kind is None else tp.full_state_dict(model), kept, repr(model)


def in_16_bits(few=True):
    """[dtypes of y, dx and dW of a column- and a row-parallel layer under autocast]."""
    found, world = [], comm.world()
    for cut, n in ((tp.ColumnParallelLinear, 6), (tp.RowParallelLinear, 6 // world.size)):
        module, x = cut(nn.Linear(6, 4), world), mt.tensor(np.ones((2, 3, n), "f4"), requires_grad=True)
        module = convert_to_low_precision_training(module) if few else module
        with mt.autocast("bfloat16"):
            y = module(x)
        y.astype("float32").sum().backward()
        found.append([t.dtype.name for t in (y, x.grad, module.weight.grad)])
    return found


def chosen_by_one():
    """What ranks hear of which one alone takes few bits."""
    model = nn.Sequential(tp.RowParallelLinear(nn.Linear(8, 6), comm.world()))
    try:
        if comm.world().rank:
            convert_to_low_precision_training(model)
        model(np.ones((2, 4), "f4")).sum().backward()
    except Exception as error:
        return type(error).__name__
    return "nothing"
