"""What the ranks do in the tests of rollouts. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.nn.preference import grpo_loss
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.rollouts import log_probs, roll_out
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, LENGTH, QUESTION, COUNT, GROUP, END, SEED = 11, 9, 3, 5, 3, 4, 7
OPTIONS = {"group": GROUP, "count": COUNT, "seed": SEED, "end": END, "temperature": 0.7}


def gpt(scale=3):
    """What it writes depends on all it has read."""
    mt.manual_seed(1)
    model = nn.GPT(VOCABULARY, LENGTH, layers=2, heads=4, dim=16, kv_heads=2, positions="rotary", dtype=np.float64)
    for p in model.parameters():
        p.data *= scale
    return model


def reward(tokens, labels):
    """What is like the label, but short; of some questions all answers get the same."""
    close = -abs(tokens[:, QUESTION:] - labels[:, None]).sum(1) / 10
    return np.where(labels > 8, 0.1, close)


def loader(rank, size, batch_size, exact):
    rng = np.random.default_rng(3)
    questions, labels = rng.integers(0, VOCABULARY, (12, QUESTION)), rng.integers(0, VOCABULARY, 12)
    return data.Loader(questions, labels, batch_size, seed=5, rank=rank, size=size, micro_shards=8 if exact else 1)


def loss_sum(model, answers):
    return grpo_loss(log_probs(model, answers), answers.old, answers.advantages, answers.counted, answers.reference,
                     clip_low=0.02, clip_high=0.03, beta=0.2)


def cut(model, way, mesh, exact):
    """(the trained model, the reference) by a way: "ddp", "tensor" or a stage of fully_shard."""
    if way == "tensor":
        for m in model:
            tp.parallelize_module(m, mesh["tp"], tp.plan_of(m))
    trained, reference = model
    if way in ("ddp", "tensor"):
        return DistributedDataParallel(trained, mesh["dp"], exact=exact), reference
    return fully_shard(trained, mesh["dp"], stage=way, exact=exact), reference


def whole_state(model, way):
    if way == "tensor":
        return tp.full_state_dict(model.module)
    return model.module.state_dict() if way == "ddp" else full_state_dict(model)


def train(way, exact=False, batch_size=5):
    """(the whole parameters after some steps, [what was drawn and told at each]): two optimizer steps on each."""
    mesh = comm.DeviceMesh(dp=-1, tp=2 if way == "tensor" else 1)
    world = mesh["dp"]
    model, reference = cut((gpt(), gpt(2.9)), way, mesh, exact)
    optimizer, told = optim.SGD(model.parameters(), lr=0.003, momentum=0.9), []
    for step, batch in enumerate(loader(world.rank, world.size, batch_size, exact).epoch(0)):
        drawn = roll_out(model, batch, reward, world, step=step, reference=reference, **OPTIONS)
        losses = [training.train_step(model, optimizer, drawn.batch, loss_sum, world, seed=SEED, step=2 * step + i,
                                      units=drawn.units)[0] for i in range(2)]
        answers = [(a.rows, a.inputs, a.labels, a.rewards, a.advantages, a.old, a.reference)
                   for a in drawn.batch.shards]
        told.append((drawn.tokens, drawn.reward, drawn.kl, drawn.batch.count, losses, answers))
    return whole_state(model, way), told


def bytes_sent(stage):
    """Bytes that this rank has sent by all-gathers: for a rollout; for a forward per token of it; for one gathering of
    all its units, by formula."""
    world = comm.world()
    model = fully_shard(gpt(), world, stage=stage)
    (batch,) = loader(world.rank, world.size, 12, False).epoch(0)
    with ledger.record() as book:
        roll_out(model, batch, reward, world, step=0, **OPTIONS | {"end": None})
    found = [book.bytes_sent["world", "all_gather"]]
    tokens = np.zeros((2, QUESTION), np.int64)
    with ledger.record() as book, mt.no_grad():
        for _ in range(COUNT):
            new = model(tokens).numpy()[:, -1].argmax(1)
            tokens = np.concatenate([tokens, new[:, None]], 1)
    found.append(book.bytes_sent["world", "all_gather"])
    return *found, (world.size - 1) * sum(unit.part.nbytes for unit in model.units)


def tensor_bytes():
    """(bytes of the all-reduces of a rollout on ranks that share a model, its answers)."""
    mesh = comm.DeviceMesh(dp=1, tp=-1)
    model, _ = cut((gpt(), gpt()), "tensor", mesh, False)
    (batch,) = loader(0, 1, 12, False).epoch(0)
    with ledger.record() as book:
        roll_out(model, batch, reward, mesh["dp"], step=0, **OPTIONS | {"end": None})
    return book.bytes_sent["tp", "all_reduce"], 12 * GROUP


def of_experts():
    """A GPT with a mixture of experts."""
    mt.manual_seed(1)
    model = nn.GPT(VOCABULARY, LENGTH, layers=1, heads=4, dim=16, dtype=np.float64,
                   moe={"experts": 4, "k": 2, "capacity_factor": 2, "group": "sequence"})
    for p in model.parameters():
        p.data *= 3
    return model


def all_have_ended():
    """(tokens of this rank's row by a model whose experts are divided, those of all rows by one that is whole, the
    token that ends them): it stands in each row, at another place in each, and not at the end."""
    world, model, whole = comm.world(), of_experts(), of_experts()
    for seed in range(100):
        questions = np.random.default_rng(seed).integers(0, VOCABULARY, (world.size, QUESTION))
        texts = whole.generate(questions, COUNT, 0)
        in_all = set.intersection(*({*row} for row in texts[:, QUESTION:-1].tolist()))
        places = {end: {row.index(end) for row in texts[:, QUESTION:].tolist()} for end in in_all}
        if ends := [end for end, at in places.items() if len(at) > 1]:
            break
    tp.parallelize_module(model, world, moe.plan_of(model))
    return model.generate(questions[world.rank:world.rank + 1], COUNT, 0, end=ends[0]), texts, ends[0]


def of_divided_experts():
    """(tokens of this rank's rows by a model whose experts are divided, by one that is whole, which token ends them,
    rewards of a rollout of each's rows): all answers of the first rank's rows end before another's."""
    world, model, whole = comm.world(), of_experts(), of_experts()
    questions = np.random.default_rng(4).integers(0, VOCABULARY, (world.size, QUESTION))
    texts = whole.generate(questions, COUNT, 0)
    end = next(token for token in texts[0, QUESTION:-1] if token not in texts[1, QUESTION:])
    tp.parallelize_module(model, world, moe.plan_of(model))
    mine = questions[world.rank:world.rank + 1]
    found = model.generate(mine, COUNT, 0, end=int(end))
    options = OPTIONS | {"end": int(end)}
    (batch,) = data.Loader(questions, questions[:, 0], world.size, rank=world.rank, size=world.size).epoch(0)
    (all_of_them,) = data.Loader(questions, questions[:, 0], world.size).epoch(0)
    told = [roll_out(m, b, reward, c, step=0, **options).reward
            for m, b, c in ((model, batch, world), (whole, all_of_them, world.split(world.rank)))]
    return found, texts[world.rank], int(end), told


def errors():
    """{what is wrong: (type, message)}."""
    world, found = comm.world(), {}
    model = DistributedDataParallel(gpt(), world)
    (batch,) = loader(world.rank, world.size, 12, False).epoch(0)

    def attempt(name, batch=batch, by=reward, **options):
        try:
            roll_out(model, batch, by, world, **{"step": 0} | OPTIONS | options)
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    attempt("too long", count=LENGTH)
    attempt("one too long", count=LENGTH - QUESTION + 2)
    attempt("as long as can be", count=LENGTH - QUESTION + 1, temperature=1e30)
    attempt("one token", count=1, temperature=1e-30)
    attempt("nothing", count=0)
    attempt("likeliest", temperature=0)
    attempt("coldest", temperature=1e-31)
    attempt("hottest", temperature=1e31)
    attempt("alone", group=1)
    attempt("pairs", by=lambda tokens, labels: tokens)
    attempt("not finite", by=lambda tokens, labels: labels * np.nan)
    attempt("one rank's", by=lambda tokens, labels: failing(tokens) if world.rank == world.size - 1 else labels / 9)
    attempt("fits")
    return found


def failing(tokens):
    """A reward that knows nothing of these answers."""
    raise KeyError("no such problem")


def other_settings(name, values):
    """What ranks say that give other values of an option."""
    world = comm.world()
    model = DistributedDataParallel(gpt(), world)
    (batch,) = loader(world.rank, world.size, 12, False).epoch(0)
    try:
        roll_out(model, batch, reward, world, **{"step": 0} | OPTIONS | {name: values[world.rank]})
    except Exception as error:
        return type(error).__name__, str(error)
    return None
