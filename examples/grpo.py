"""Train a small GPT further by reinforcement learning: from rewards for answers that it writes itself.

    python examples/grpo.py                             # GRPO: better than the other answers to the same question?
    mpirun -n 2 python examples/grpo.py --exact         # the same curve to the last bit
    python examples/grpo.py --dpo                       # DPO: of two of its answers the right one is preferred

It begins with sums from a careless text, of which most forget the carry, and learns to do as that text does. Then it is
asked, several times each, and told of each answer only whether it is right. The run's folder gets history.jsonl,
summary.json, parameters.npz, reference.npz (what it was after the careless text) and curve.png.
"""

import sys
import time
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import backend, comm, divergence, nn, optim, program, training
from minitorch_dist.autodiff import ops
from minitorch_dist.backend import xp
from minitorch_dist.checks import Checks
from minitorch_dist.data import Loader
from minitorch_dist.data.text import addition
from minitorch_dist.nn.preference import dpo_loss, grpo_loss
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.rollouts import COLDEST, HOTTEST, log_probs, roll_out
from minitorch_dist.viz.figure import drawn

MODEL = {"length": 8, "layers": 2, "heads": 4, "dim": 64}
DIGITS, BATCH = 3, 128      # of an answer; of the careless text, per step
EVAL_CHUNK = 64
# What the curve doesn't depend on.
OUTSIDE = ("out", "save_every", "async_save", "resume", "eval_every", *program.CHECKS)
RANGES = {
    program.AT_LEAST_1: ("warm_steps", "steps", "questions", "group", "updates", "eval_every", "save_every"),
    program.AT_LEAST_0: ("warm_lr", "lr", "beta", "clip_low", "clip_high", "clip", "seed"),
    program.PROBABILITY: ("careless",),
    (f"{COLDEST} to {HOTTEST}, which float32 can divide by", lambda value: COLDEST <= value <= HOTTEST):
        ("temperature",),
}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="grpo.py", description=__doc__)
    p.add_argument("--careless", type=float, default=0.6, help="share of the text's sums that forget the carry")
    p.add_argument("--warm-steps", type=int, default=400, help=f"steps on that text, of {BATCH} sums")
    p.add_argument("--warm-lr", type=float, default=5e-3, help="learning rate there")
    p.add_argument("--steps", type=int, default=100, help="times that questions are asked, and learnt from")
    p.add_argument("--questions", type=int, default=64, help="per step over all ranks")
    p.add_argument("--group", type=int, default=8, help="answers to each")
    p.add_argument("--updates", type=int, default=1, help="optimizer steps on each step's answers")
    p.add_argument("--temperature", type=float, default=1.0, help="at which answers are drawn")
    p.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    p.add_argument("--beta", type=float, help="of GRPO, what the KL to the careless model counts (default: 0.01); of "
                   "DPO, how much its pairs weigh (default: 0.1)")
    p.add_argument("--clip-low", type=float, default=0.2, help="a bad answer's token gains nothing below 1 - this")
    p.add_argument("--clip-high", type=float, default=0.28, help="a good answer's token gains nothing above 1 + this")
    p.add_argument("--clip", type=float, default=1.0, help="greatest global norm of the gradients")
    p.add_argument("--dpo", action="store_true", help="learn from a right and a wrong answer of each group, by DPO")
    p.add_argument("--eval-every", type=int, default=10, help="steps between two looks at the unseen sums")
    p.add_argument("--seed", type=int, default=0, help="of initial values, order, answers and problems")
    p.add_argument("--exact", action="store_true", help="the same bits on 1, 2, 4 or 8 ranks (slower)")
    p.add_argument("--out", type=Path, help="folder for the run's files (default: runs/grpo-RANKS, runs/dpo-RANKS)")
    p.add_checks(work=False)
    p.add_checkpoints()
    args = p.parse_args(argv)
    args.beta = (0.1 if args.dpo else 0.01) if args.beta is None else args.beta
    p.check_ranges(args, RANGES)
    p.check_needs(args, {"GRPO (no --dpo)": (not args.dpo, ["clip_low", "clip_high"])})
    return args


# ---------------------------------------------------------------- questions, and who answers them

def careless(problems, share, seed):
    """The problems' training rows, of which such a share forgets to carry: 17+25=230, which is 032 reversed."""
    rows, zero = problems.train.copy(), problems.vocabulary.numbers["0"]
    tens, ones = (rows[:, [i, i + 3]].sum(1) - 2 * zero for i in (0, 1))
    answers = xp.stack([ones % 10, tens % 10, 0 * ones], 1) + zero
    chosen = backend.stream("careless", seed).random(len(rows)) < share
    rows[chosen, problems.question:] = answers[chosen]
    return rows


def right(tokens, solutions):
    """The reward: 1 for a sum that is right in all its digits, 0 for any other."""
    return (tokens == solutions).all(1)


def accuracy(model, problems, world):
    """Percent of the unseen sums that the model gets right when it takes the likeliest digits. Collective."""
    rows, question, found = problems.test, problems.question, 0
    for i in range(world.rank * EVAL_CHUNK, len(rows), world.size * EVAL_CHUNK):    # the same chunks on any ranks
        chunk = rows[i:i + EVAL_CHUNK]
        found += int(right(model.generate(chunk[:, :question], DIGITS, temperature=0), chunk).sum())
    total = xp.array([found])
    world.all_reduce(total)
    return 100.0 * int(total[0]) / len(rows)


# ---------------------------------------------------------------- losses

def cross_entropy(model, shard):
    """The sum of the careless text's losses."""
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def grpo(args):
    """loss_sum of GRPO."""
    return lambda model, answers: grpo_loss(
        log_probs(model, answers), answers.old, answers.advantages, answers.counted, answers.reference,
        args.clip_low, args.clip_high, args.beta)


def pairs(answers, group):
    """(rows of right answers, rows of wrong ones): one of each, of all groups that have both."""
    rewards = answers.rewards.reshape(-1, group)
    first = xp.arange(len(rewards)) * group
    both = rewards.max(1) > rewards.min(1)
    return (first + rewards.argmax(1))[both], (first + rewards.argmin(1))[both]


def dpo(args):
    """loss_sum of DPO."""
    def loss_sum(model, answers):
        good, bad = pairs(answers, args.group)
        whole, before = ops.sum(log_probs(model, answers), -1), answers.reference.sum(-1)
        return dpo_loss(whole[good], whole[bad], before[good], before[bad], args.beta, "sum")
    return loss_sum


def number_of_pairs(batch, group, world):
    """On all ranks together. Collective."""
    found = xp.array([sum(len(pairs(answers, group)[0]) for answers in batch.shards)])
    world.all_reduce(found)
    return int(found[0])


# ---------------------------------------------------------------- training

def optimizer_of(model, args, lr, steps, weight_decay):
    """(AdamW, its schedule)."""
    optimizer = optim.AdamW(training.decay_groups(model, weight_decay), lr=lr, betas=(0.9, 0.99))
    return optimizer, optim.LambdaLR(optimizer, optim.cosine(steps, min(50, steps // 6), final=0.1))


def warm_start(args, world, model, problems, interrupt):
    """Learn what the careless text does; whether somebody wants to stop. Its steps are numbered up to 0: faults on
    purpose name those that come then."""
    inputs, labels = problems.windows(careless(problems, args.careless, args.seed))
    loader = Loader(inputs, labels, BATCH, seed=args.seed, rank=world.rank, size=world.size,
                    micro_shards=8 if args.exact else 1)
    optimizer, schedule = optimizer_of(model, args, args.warm_lr, args.warm_steps, 0.1)
    batches = (batch for epoch in count() for batch in loader.epoch(epoch))
    for step, batch in enumerate(islice(batches, args.warm_steps), -args.warm_steps):
        with divergence.ends(world), careless_in_words():
            _, stop = training.train_step(model, optimizer, batch, cross_entropy, world, seed=args.seed, step=step,
                                          units=DIGITS, clip=args.clip, stop=interrupt.wanted)
        schedule.step()
        if stop:
            return True
    return False


@contextmanager
def careless_in_words():
    """A Diverged of the steps that are numbered up to 0 says so."""
    try:
        yield
    except divergence.Diverged as error:
        raise divergence.Diverged(f"on the careless text, whose steps are numbered up to 0: {error}") from None


def prepare(args, world):
    """All that training needs, and nothing begun. ValueError or OSError on all ranks where something doesn't fit."""
    if args.exact:
        training.prepare_exact(world)
    if args.group < 2:
        raise ValueError(f"--group {args.group}: an answer is compared with others to the same question: 2 or more")
    problems = addition(2, seed=args.seed)
    loader = Loader(problems.train[:, :problems.question], problems.train, args.questions, seed=args.seed + 1,
                    rank=world.rank, size=world.size, micro_shards=8 if args.exact else 1)
    mt.manual_seed(args.seed)
    reference = nn.GPT(len(problems.vocabulary), **MODEL)
    model = DistributedDataParallel(nn.GPT(len(problems.vocabulary), **MODEL), world, exact=args.exact)
    args.out = args.out or Path("runs") / f"{'dpo' if args.dpo else 'grpo'}-{world.size}"
    optimizer, schedule = optimizer_of(model, args, args.lr, args.steps, 0.0)
    checks = Checks(args, world, model, args.steps, updates=args.updates)
    settings = {name: value for name, value in vars(args).items() if name not in OUTSIDE}
    run = training.Run(args.out, world, settings, args.resume, args.async_save, bool(args.save_every))
    run.restore(model, optimizer, schedule)
    if run.resume:
        training.load_parameters(args.out / "reference.npz", reference)
    return problems, loader, model, reference, optimizer, schedule, checks, run


def begin(args, world, model, reference, problems, run, progress, interrupt):
    """The careless model as the reference, where the run doesn't come from a checkpoint; its curve so far, or None
    where somebody wants to stop."""
    if run.resume:
        return run.facts["curve"], run.facts["looks"]
    progress.say(f"{args.warm_steps:,} step{'s' * (args.warm_steps > 1)} on a text in which {100 * args.careless:.0f} "
                 "% of the sums forget the carry")
    if warm_start(args, world, model, problems, interrupt):
        progress.say("interrupted before it was asked anything: there is nothing to save, and to go on from")
        return None
    reference.load_state_dict(model.module.state_dict())
    if world.rank == 0:
        training.save_parameters(args.out / "reference.npz", reference)
    looks = [(0, accuracy(reference, problems, world))]
    progress.say(f"then {looks[0][1]:.1f} % of the unseen sums are right; from now on it is told which of its own "
                 f"answers are, {args.group} to each of {min(args.questions, len(problems.train)):,} questions a step")
    return [], looks


def train(args, world):
    """Train, and return the summary; of a run without a step the exit status alone."""
    with program.usage_errors("grpo.py"):
        problems, loader, model, reference, optimizer, schedule, checks, run = prepare(args, world)
    loss_sum, stop = (dpo if args.dpo else grpo)(args), False
    with run, program.Progress(world, args.steps) as progress, program.Interrupt() as interrupt, divergence.quiet():
        begun = begin(args, world, model, reference, problems, run, progress, interrupt)
        if begun is None:
            return {"exit_status": interrupt.status(world)}
        curve, looks = begun
        checks.begin()
        batches = ((epoch, batch) for epoch, part in run.epochs(loader, args.steps) for batch in part)
        for epoch, batch in batches:
            start = time.perf_counter()
            drawn = roll_out(model, batch, right, world, group=args.group, count=DIGITS, seed=args.seed, step=run.step,
                             temperature=args.temperature, reference=reference)
            units = max(number_of_pairs(drawn.batch, args.group, world), 1) / drawn.batch.count if args.dpo else \
                drawn.units
            for update in range(args.updates):
                loss, stop = training.train_step(model, optimizer, drawn.batch, loss_sum, world, seed=args.seed,
                                                 step=args.updates * run.step + update, units=units, clip=args.clip,
                                                 stop=interrupt.wanted)
            schedule.step()
            run.log(loss, epoch, drawn.batch.count, start)
            curve.append((run.step, drawn.reward, drawn.kl))
            progress.step(loss)
            last = stop or run.step == args.steps
            if last or run.step % args.eval_every == 0:
                looks.append((run.step, accuracy(model.module, problems, world)))
                progress.say(f"step {run.step:,} of {args.steps:,}: reward {drawn.reward:.3f}, KL {drawn.kl:.3f}; "
                             f"{looks[-1][1]:.1f} % of the unseen sums are right")
            saves = stop or run.due(args.save_every, args.steps)
            checks.after(run.step, batch, saves, progress.say)
            if saves:
                run.save(model, optimizer, curve=curve, looks=looks)
            if last:
                break
        if stop:
            progress.say(interrupt.said(run, args.steps))
        checks.end(progress.say)
        status = interrupt.status(world)
    settings = {k: v for k, v in vars(args).items()
                if k not in ("out", "steps", "resume", "save_every", "async_save", *program.CHECKS)}
    return run.finish(model, data="addition", before=looks[0][1], after=looks[-1][1], curve=curve, looks=looks,
                      interrupted=stop, exit_status=status, **settings)


def picture(summary, path):
    """Rewards, accuracy and KL over steps."""
    steps, rewards, kl = xp.array(summary["curve"]).T
    looked, percent = xp.array(summary["looks"]).T
    with drawn(path, (8, 4.5)) as figure:
        axes = figure.subplots()
        axes.plot(steps, 100 * rewards, label="reward: drawn answers that are right", lw=1.6)
        axes.plot(looked, percent, "o-", label="unseen sums that are right, likeliest digits", lw=1.6)
        axes.set_xlabel("step")
        axes.set_ylim(0, 102)
        axes.set_ylabel("right, %")
        figure.legend(loc="outside upper center", ncols=2, frameon=False)       # KL may be anywhere
        beside = axes.twinx()
        beside.plot(steps, kl, color="0.6", lw=1.2)
        beside.set_ylabel("KL to the careless model, nats per token", color="0.4")
        beside.set_ylim(bottom=0)


def main(argv=None):
    """The program; returns the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM. SystemExit(2) for what can't be
    trained, SystemExit(1) where the loss is no number any more."""
    with program.usage_errors("grpo.py"):
        world = comm.world()
        args = parse(argv)
    summary = train(args, world)
    if world.rank == 0 and "curve" in summary:
        picture(summary, args.out / "curve.png")
        print(f"unseen sums right: {summary['before']:.1f} % before, {summary['after']:.1f} % after; parameters "
              f"{summary['parameters_sha256'][:12]}, curve in {args.out / 'curve.png'}")
    world.barrier()     # while rank 0 draws no other may end, which after a signal would end the job
    return summary["exit_status"]


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
