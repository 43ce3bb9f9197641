"""Train a small GPT by several forms of parallelism at once (3D parallelism, and two axes more): the same curve.

    python examples/mesh.py --out runs/one
    mpirun -n 8 python examples/mesh.py --tp 2 --pp 2 --zero 1 --out runs/eight     # and dp 2, which is left
    mpirun -n 4 python examples/mesh.py --cp 2 --pp 2 --schedule zb-h1 --out runs/four
    python mnist_demo/compare.py runs/one runs/eight runs/four
    mpirun -n 8 python examples/mesh.py --experts 8 --ep 2 --pp 2 --schedule dualpipev      # as DeepSeek-V3 was

The ranks are a mesh: dp divides the samples, pp the blocks, cp each sequence, ep the experts of a model that has some
(and the samples), tp each matrix. What a rank holds in the second step, and sends along each axis, is counted and
printed beside what `python -m minitorch_dist plan` says of it on paper. It learns two-digit addition, or a text; in
float32 AdamW makes more of what rounding differs in, and in --dtype float64 the curves are one to ten digits; with
--exact, which goes with dp, pp, ep and ZeRO, to the last bit. A run broken off (Ctrl-C) goes on by --resume, on another
mesh as well.
"""

import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, divergence, faults, ledger, nn, optim, program, training, viz
from minitorch_dist.checks import Checks
from minitorch_dist.data import Loader
from minitorch_dist.data.text import IGNORED, Windows, addition, read_text
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.context.context import HOW, context_parallel, cut_sequence
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.pipelines import Pipeline, cut_gpt, full_state_dict
from minitorch_dist.parallel.pipelines.schedules import SCHEDULES, placement_of, schedule_of
from minitorch_dist.parallel.tensor import parallelize_module, plan_of
from minitorch_dist.plan import DEVICES, GPT, Job, plan
from minitorch_dist.plan.refused import UNCUT
from minitorch_dist.qk_clip import QKClip

AXES = ("dp", "pp", "cp", "ep", "tp")       # neighbours are tp's: they send most
SETTINGS = ("family", "layers", "heads", "dim", "length", "window", "qk_norm", "gated", "experts", "no_capacity",
            "dropout", "attention_dropout", "dtype", "lr", "warmup", "clip", "qk_clip", "seed", "steps", "batch_size",
            "exact", "dispatch_bits")   # what the curve depends on; none of the mesh
REPLICAS = ("dp", "cp", "ep")       # over which gradients are summed
SIZES = {"layers": (4, "blocks"), "heads": (4, "attention heads"), "dim": (64, "width"),
         "length": (8, "characters that the model sees"), "batch_size": (128, "samples per step, over all ranks"),
         "steps": (600, "optimizer steps")}
ALIASES = {"dim": ["--width"], "length": ["--sequence-length"], "batch_size": ["--batch"]}       # as plan calls them
CUTS = ("zero", "schedule", "chunks", "micro_batches", "slices", "cp_by", "sequence_parallel", "experts_over",
        "compile")
EXPERTS = ("cp,ep", "cp,ep,tp", "cp,tp", "ep,tp")       # ranks that divide them; what these send is ep's
HELD = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
NOTE = ("counted: with norms for clipping, and the whole batch's tokens; on paper: as if each token were a target, and "
        "nothing overlapped")
ALIKE = ", and all experts used alike"
SCORES = ", and no scores looked at, for which a ring's keys go round once more"
SAYS_EVERY = 100    # steps
RANGES = {
    program.AT_LEAST_1: (*SIZES, "pp", "cp", "ep", "tp", "chunks", "micro_batches", "slices", "save_every"),
    program.AT_LEAST_0: ("experts", "lr", "warmup", "clip", "seed"),
    program.MORE_THAN_0: ("qk_clip",),
    program.PROBABILITY: ("dropout", "attention_dropout"),
}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="mesh.py", description=__doc__)
    p.section("ranks")
    for axis, what in (("pp", "blocks"), ("cp", "sequences"), ("ep", "experts, and samples"), ("tp", "matrices")):
        p.add_argument(f"--{axis}", type=int, default=1, help=f"ranks that divide the {what}; those left are dp's")
    p.add_argument("--zero", type=int, choices=[0, 1, 2, 3], default=0, help="ZeRO's stage, over dp, cp and ep")
    p.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="who works when, along pp")
    p.add_argument("--chunks", type=int, default=2, help="of blocks, per rank, in interleaved (the V's have 2)")
    p.add_argument("--micro-batches", type=int, help="pieces of a rank's samples (default: 4; --exact has its own)")
    p.add_argument("--slices", type=int, default=1, help="in which sequences go through pp, one after another "
                   f"(default: 1); with {', '.join(UNCUT)}")
    p.add_argument("--exact", action="store_true", help="the bits of one process, with dp, pp, ep; 8 micro-batches "
                   "over all ranks")
    p.add_argument("--cp-by", choices=list(HOW), default="ring", help="how attention gets the other ranks' positions")
    p.add_argument("--dispatch-bits", type=int, choices=[4, 8], help="of rows on their way to experts, and of their "
                   "answers' gradients (default: as they are)")
    p.add_argument("--dispatch-once", action="store_true", help="a token goes to a rank once, however many of its "
                   "experts are there; with --no-capacity")
    p.add_argument("--sequence-parallel", action="store_true", help="tp divides what lies between its matrices, too")
    p.add_argument("--experts-over", nargs="+", choices=["cp", "tp"], default=[], help="these ranks divide experts, "
                   "too, and route their own positions; with --no-capacity, tp with --sequence-parallel")
    p.section("task and model")
    p.add_argument("--text", help="a UTF-8 file to learn (default: addition problems)")
    p.add_argument("--family", choices=list(FAMILIES), default="gpt", help="see gpt.py")
    for name, (default, text) in SIZES.items():
        p.add_argument(f"--{name.replace('_', '-')}", *ALIASES.get(name, []), type=int, default=default, help=text)
    p.add_argument("--window", metavar="N", help="characters that one sees at most, itself among them (default: all); "
                   "several, by commas, for one block after another, and again from the first: 4,4,all; "
                   "2x4: 2 blocks of 4, which it chooses; linear: all, kept as a state of fixed size; delta: the "
                   "same, what is under a key is replaced")
    p.add_argument("--qk-norm", action="store_true", help="norms of each head's queries and keys")
    p.add_argument("--gated", action="store_true", help="what each head finds is multiplied by sigmoids of gates")
    p.add_argument("--experts", type=int, default=0, help="in each block, of which a token meets two (default: none)")
    p.add_argument("--no-capacity", action="store_true", help="an expert takes all tokens that choose it (default: "
                   "1.25 times its share of a sequence's)")
    p.add_argument("--dropout", type=float, default=0.0, help="probability to drop a unit")
    p.add_argument("--attention-dropout", type=float, default=0.0, help="probability to drop a weight of attention; "
                   "not in a ring: --cp-by all_to_all")
    p.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="of all numbers")
    p.section("training")
    p.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW, after a warmup, down to a tenth")
    p.add_argument("--warmup", type=int, help="steps over which it rises (default: 50, or half of the run)")
    p.add_argument("--clip", type=float, default=1.0, help="greatest global norm of the gradients")
    p.add_argument("--qk-clip", type=float, metavar="SCORE", help="the greatest that attention's scores may come to, "
                   "see gpt.py")
    p.add_argument("--seed", type=int, default=0, help="of initial values, order and dropout")
    p.add_argument("--compile", action="store_true", help="run each block, and the optimizer, as fused kernels: "
                   "mt.compile")
    p.add_argument("--out", type=Path, help="folder for the run's files (default: runs/mesh-RANKS)")
    p.add_checks(work=False)
    p.add_checkpoints()
    args = p.parse_args(argv)
    args.window = p.windows(args.window)
    p.check_ranges(args, RANGES)
    p.check_needs(args, {"--schedule interleaved": (args.schedule == "interleaved", ["chunks"])})
    return args


class Task:
    """What is learned: vocabulary, inputs and targets, integers (samples, length), and how many targets of a sample
    count. Sums that the model never sees, unless it is a text."""

    def __init__(self, args):
        if args.text:
            text = read_text(args.text)
            windows = Windows(text.train, args.length)
            self.name, self.problems, self.vocabulary = Path(args.text).name, None, text.vocabulary
            self.inputs, self.targets = windows.inputs, windows.targets
            self.crc32 = training.crc32(text.train)
        else:
            self.problems = addition(2, seed=args.seed)
            self.name, self.vocabulary = "addition", self.problems.vocabulary
            self.inputs, self.targets = self.problems.windows(self.problems.train)
            self.crc32 = training.crc32(self.inputs, self.targets)
            if args.length != self.inputs.shape[1]:
                raise ValueError(f"--length {args.length}: a sum has {self.inputs.shape[1]} characters to be seen")
        self.units = int((self.targets[0] != IGNORED).sum())

    def right(self, model):
        """Percent of the unseen sums that the whole model gets right; None of a text."""
        if self.problems is None:
            return None
        rows, question = self.problems.test, self.problems.question
        written = model.generate(rows[:, :question], rows.shape[1] - question, temperature=0)
        return 100.0 * float((written == rows).all(1).mean())


def mixture_of(args):
    """What nn.MoE and plan.GPT get. Each sequence's tokens choose among themselves: so the mesh makes no difference.
    ValueError for no capacity of no experts."""
    if args.no_capacity and not args.experts:
        raise ValueError("--no-capacity without --experts: say how many there are")
    return {"experts": args.experts, "group": "sequence"} | ({"capacity_factor": None} if args.no_capacity else {})


def network(args, task):
    """The whole model, alike everywhere."""
    mt.manual_seed(args.seed)
    return nn.GPT(len(task.vocabulary), args.length, args.layers, args.heads, args.dim, dropout=args.dropout,
                  tied=args.family == "gpt", dtype=np.dtype(args.dtype), window=args.window,
                  qk_norm=args.qk_norm, gated=args.gated, attention_dropout=args.attention_dropout,
                  **FAMILIES[args.family],
                  moe=mixture_of(args) if args.experts else None)


def mesh_of(args, world):
    """The ranks as a grid. ValueError where they don't make one up."""
    sizes = {axis: getattr(args, axis) for axis in AXES[1:]}
    inner = math.prod(sizes.values())
    if world.size % inner:
        raise ValueError(f"{' '.join(f'--{axis} {n}' for axis, n in sizes.items())}: {inner} ranks, or a multiple, and "
                         f"here {'is' if world.size == 1 else 'are'} {world.size}")
    return comm.DeviceMesh(world, dp=-1, **sizes)


def micro_batches_of(args, mesh):
    """How many pieces a rank's samples come in. ValueError for exact mode where it can't be had."""
    if not args.exact:
        return args.micro_batches or 4
    if args.micro_batches:
        raise ValueError(f"--micro-batches {args.micro_batches} --exact: exact mode has 8 over all ranks")
    if args.dispatch_once:
        raise ValueError("--exact --dispatch-once: ranks would add up what their experts answer; one process adds "
                         "up in another order: leave one of both out")
    if inside := [f"--{axis} {mesh[axis].size}" for axis in ("cp", "tp") if mesh[axis].size > 1]:
        raise ValueError(f"--exact {' '.join(inside)}: sums over these ranks are inside of products, which one process "
                         "adds up in another order: take --pp, --ep, --zero and dp")
    training.prepare_exact(mesh["dp", "ep"])
    return 8 // mesh["dp", "ep"].size


def pipeline_of(args, task, mesh):
    """The model, cut up to four times, and wrapped: matrices, experts, sequences, blocks; then the samples. Compiled by
    blocks, before ZeRO 3 takes their values away."""
    model, replicas = network(args, task), mesh[REPLICAS]
    if args.tp > 1:
        parallelize_module(model, mesh["tp"], plan_of(model), args.sequence_parallel)
    over = tuple(axis for axis in AXES if axis in args.experts_over or axis == "ep" and args.ep > 1)
    if over:
        parallelize_module(model, mesh[over], moe.plan_of(model))
    if args.dispatch_bits:
        moe.dispatch_in_few_bits(model, args.dispatch_bits)
    if args.dispatch_once:
        moe.dispatch_once(model)
    if args.cp > 1:
        context_parallel(model, mesh["cp"], args.cp_by)
    for i, block in enumerate(model.blocks) if args.compile else ():
        model.blocks[i] = mt.compile(block)
    schedule = schedule_of(args.schedule, args.pp, args.micro_batches, args.chunks, args.slices)
    placement = placement_of(schedule)
    count = sum(map(len, placement))
    if args.layers % count:
        raise ValueError(f"--layers {args.layers}: {count} stages, {count // args.pp} on each of {args.pp} ranks, want "
                         "equally many blocks each")
    stages = cut_gpt(model, count, costs=[1] * args.layers)

    def wrapped(stage):
        if not args.zero:
            return DistributedDataParallel(stage, replicas, exact=args.exact)
        # Of one block in a stage as well, and of one that is compiled: what is in it can't come and go by itself.
        units = list(stage.blocks) if count > 1 or args.compile else None
        return fully_shard(stage, replicas, stage=args.zero, units=units, exact=args.exact)
    return Pipeline([wrapped(stages[i]) for i in placement[mesh["pp"].rank]], mesh["pp"], schedule)


def on_paper(args, task, mesh):
    """plan.Plan of the run."""
    sizes = GPT(args.layers, args.dim, args.heads, len(task.vocabulary), args.length, tied=args.family == "gpt",
                dropout=args.dropout > 0, family=args.family, window=args.window, qk_norm=args.qk_norm,
                gated=args.gated, attention_dropout=args.attention_dropout > 0, **mixture_of(args))
    job = Job(sizes, **mesh.axes, stage=args.zero, precision="float32", batch=args.batch_size,
              time=task.inputs.shape[1], micro_batches=args.micro_batches, schedule=args.schedule,
              chunks=args.chunks if args.schedule == "interleaved" else 1, sequence_parallel=args.sequence_parallel,
              slices=args.slices, cp_by=args.cp_by, tiled_loss=True, dispatch_bits=args.dispatch_bits,
              dispatch_once=args.dispatch_once, experts_over=tuple(args.experts_over))
    return plan(job, DEVICES["H100"])


def counted(book):
    """{what: bytes} that this rank has held and sent in a step, from its ledger."""
    sent = dict.fromkeys(AXES, 0)
    for (name, _), n in book.bytes_sent.items():
        axis = name.split()[0]      # "pp tied": between stages that share a parameter
        axis = "ep" if axis in EXPERTS else axis
        sent[axis if axis in AXES else "dp"] += n       # "dp,cp,ep": gradients are summed over all of them
    held = {name: book.live[kind] for name, kind in HELD.items()}
    # A stage's input counts as a parameter while it is there.
    return held | {"activations": book.peak["activation"] + book.peak["parameter"] - book.live["parameter"]} | sent


def planned(rank):
    """The same of a plan.Rank."""
    sent = {axis: sum(c.sent for c in rank.collectives if c.axis == axis) for axis in AXES}
    return {name: getattr(rank, name) for name in (*HELD, "activations")} | sent


def table(world, mesh, mine, paper, scores=False):
    """Of each place along the pipeline the most that a rank has, counted and on paper (plan.Plan, or None), as lines of
    text; scores: whether a ring looks at them. Collective."""
    everyone = world.all_gather_object((mesh["pp"].rank, mine))
    columns = [*HELD, "activations", *(axis for axis in AXES
                                       if mesh[axis].size > 1 or any(rank[axis] for _, rank in everyone))]
    heads = ["kB of a rank", *HELD, "activations", *(f"sent, {axis}" for axis in columns[len(HELD) + 1:])]
    rows = []
    for place in range(mesh["pp"].size):
        most = {name: max(rank[name] for where, rank in everyone if where == place) for name in columns}
        rows.append([f"pp {place}, counted", most])
        if paper is not None:
            rows.append(["on paper", planned(paper.ranks[place])])
    cells = [heads, *([name, *(f"{values[column] / 1e3:,.1f}" for column in columns)] for name, values in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    alike = paper is not None and paper.job.expert_ranks > 1 and paper.job.model.capacity_factor is None
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells] + (
        [] if paper is None else [NOTE + ALIKE * alike + SCORES * scores])


def prepare(args, task, mesh):
    """(pipeline, loader, optimizer, its schedule, QKClip or None) of these ranks. ValueError on all of them where
    something doesn't fit."""
    pipeline = pipeline_of(args, task, mesh)
    samples = mesh["dp", "ep"]
    loader = Loader(task.inputs, task.targets, args.batch_size, seed=args.seed, rank=samples.rank, size=samples.size,
                    micro_shards=8 if args.exact else 1)
    parameters = [p for stage in pipeline.chunks for p in stage.parameters()]
    optimizer = optim.AdamW(training.decay_groups(parameters, 0.1), lr=args.lr, betas=(0.9, 0.99))
    if args.compile:
        mt.compile(optimizer)
    args.warmup = program.warmup(args.warmup, 50, args.steps)
    rates = optim.LambdaLR(optimizer, optim.cosine(args.steps, args.warmup, final=0.1))
    clip = QKClip(pipeline.chunks, args.qk_clip) if args.qk_clip else None
    if clip and not any(mesh.world.all_gather_object(bool(clip.layers))):
        raise ValueError(f"--qk-clip {args.qk_clip:g}: no block has attention that makes scores")
    return pipeline, loader, optimizer, rates, clip


def step(args, number, batch, units, mesh, pipeline, optimizer):
    """One step; returns its loss."""
    strike = faults.of_step(mesh.world, number + 1)
    parameters = [p for stage in pipeline.chunks for p in stage.parameters()]
    strike("begin", parameters)
    optimizer.zero_grad()
    part = cut_sequence(batch, mesh["cp"]) if args.cp > 1 else batch
    with divergence.quiet():
        # No loss_sum: the last stage is given the targets, and makes losses, without logits.
        loss = pipeline.run(part, None, seed=args.seed, step=number, units=units, over=mesh[REPLICAS])
    strike("reduced", parameters)
    divergence.check(loss, number + 1, optimizer)
    pipeline.clip_grad_norm_(args.clip)
    with divergence.quiet():
        optimizer.step()
    return loss


def clipped(clip, world):
    """Clip, and say in the history how large scores were, of all blocks and heads. Collective."""
    greatest = np.array([clip.step().greatest])
    world.all_reduce(greatest, "max")
    return {"greatest_score": float(greatest[0])}


def train(args, world):
    """Train, and return the summary."""
    with program.usage_errors("mesh.py"):
        mesh, task = mesh_of(args, world), Task(args)
        args.micro_batches = micro_batches_of(args, mesh)
        paper = on_paper(args, task, mesh)      # which refuses what can't be
        pipeline, loader, optimizer, rates, clip = prepare(args, task, mesh)
        args.out = args.out or Path("runs") / f"mesh-{world.size}"
        checks = Checks(args, world, pipeline.chunks, args.steps, peers=mesh[REPLICAS])
        settings = {name: getattr(args, name) for name in SETTINGS} | {"data": task.name, "data_crc32": task.crc32}
        # With --resume on another mesh as well.
        run = training.Run(args.out, world, settings, args.resume, args.async_save, bool(args.save_every))
        run.restore(pipeline.chunks, optimizer, rates)
    stop, lines, counts_at = False, None, run.step + 1      # not the first, which makes the optimizer's state
    with run, program.Progress(world, args.steps) as progress, program.Interrupt() as interrupt:
        progress.say(f"{task.name}: {len(task.inputs):,} samples; {world.size} rank{'s' * (world.size > 1)}: "
                     f"{' × '.join(f'{axis} {size}' for axis, size in mesh.axes.items())}, ZeRO {args.zero}; "
                     f"{args.steps:,} steps of {args.batch_size}, {args.micro_batches} micro-batches"
                     + f" in {args.slices} slices" * (args.slices > 1)
                     + f"; {args.schedule}: ranks wait for {100 * paper.bubble:.0f} % of the time" * (args.pp > 1))
        checks.begin()
        for epoch, batches in run.epochs(loader, args.steps):
            for batch in batches:
                begin = time.perf_counter()
                with ledger.record(memory=True) if run.step == counts_at else nullcontext() as book:
                    loss = step(args, run.step, batch, task.units, mesh, pipeline, optimizer)
                rates.step()
                run.log(loss, epoch, batch.count, begin, **clipped(clip, world) if clip else {})
                progress.step(loss)
                if book is not None:
                    lines = table(world, mesh, counted(book), paper if args.dtype == "float32" else None,
                                  clip is not None and args.cp > 1 and args.cp_by == "ring")
                    progress.say("\n".join(lines))
                stop = interrupt.agreed(world)
                saves = stop or run.due(args.save_every, args.steps)
                checks.after(run.step, batch, saves, progress.say)
                if run.step % SAYS_EVERY == 0:
                    progress.say(f"step {run.step:,} of {args.steps:,}: loss {loss:.4f}, {run.speed:,.0f} samples/s")
                if saves:
                    run.save(pipeline.chunks, optimizer)
                if stop or run.step == args.steps:
                    break
            if stop:
                progress.say(interrupt.said(run, args.steps))
                break
        whole = network(args, task)
        whole.load_state_dict(full_state_dict(pipeline.chunks, mesh["pp"]))
        right = task.right(whole.eval())
        checks.end(progress.say)
        status = interrupt.status(world)
    return run.finish(whole, data=task.name, unseen_sums_right=right, mesh=mesh.axes, table=lines, interrupted=stop,
                      exit_status=status,
                      **{name: getattr(args, name) for name in (*SETTINGS, *CUTS) if name != "steps"})


def main(argv=None):
    """The program; returns the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM. SystemExit(2) for what can't be
    trained, SystemExit(1) where the loss is no number any more."""
    with program.usage_errors("mesh.py"):
        world = comm.world()
        args = parse(argv)
    summary = train(args, world)
    if world.rank == 0:
        viz.learning_curve(viz.read_run(args.out), args.out / "curve.png")
        if summary["unseen_sums_right"] is not None:
            print(f"{summary['unseen_sums_right']:.1f} % of the sums that it has never seen are right")
        print(f"loss {summary['final_loss']:.4f}, parameters {summary['parameters_sha256'][:12]}, run written to "
              f"{args.out}")
    world.barrier()     # while rank 0 draws no other may end, which after a signal would end the job
    return summary["exit_status"]


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
