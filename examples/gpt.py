"""Train a small GPT on characters, and let it write.

    python examples/gpt.py                              # two-digit addition: no file, no network
    mpirun -n 2 python examples/gpt.py --text play.txt  # any UTF-8 text
    python examples/gpt.py --text play.txt --pack       # its paragraphs, several to a row, each for itself

On addition it measures how many sums it has never seen it gets right; on a text
it reports the validation loss in nats per character and writes a passage. The
run's folder gets history.jsonl, summary.json, parameters.npz and curve.png.
"""

import sys
import time
from functools import partial
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import backend, comm, nn, optim, program, training, utilization, viz
from minitorch_dist.backend import xp
from minitorch_dist.checks import Checks
from minitorch_dist.data import Loader
from minitorch_dist.data.packing import apart, concatenate, pack
from minitorch_dist.data.text import IGNORED, Windows, addition, read_text
from minitorch_dist.nn.decoding import COLDEST
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.nn.windows import as_text, blocks_of, windows_of
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.qk_clip import QKClip

TEXT = {"length": 64, "layers": 4, "heads": 4, "dim": 128, "batch_size": 16, "steps": 3000, "lr": 1e-3}
ADDITION = {"length": 8, "layers": 2, "heads": 4, "dim": 64, "batch_size": 128, "steps": 2000, "lr": 3e-3}
EVAL_CHUNK = 64
BUILT_BY = ("length", "layers", "heads", "dim", "kv_heads", "hidden", "window", "qk_norm", "gated", "family",
            "positions", "norm")
SIZES = {"length": "characters that the model sees", "layers": "blocks", "heads": "attention heads", "dim": "width",
         "batch_size": "samples per step over all ranks", "steps": "optimizer steps"}
# What the curve doesn't depend on: with all else the same a run can go on from a checkpoint.
OUTSIDE = ("text", "out", "device", "mfu", "save_every", "async_save", "resume", "eval_every", "eval_windows", "sample",
           "temperature", "top_k", "top_p", *program.CHECKS)
RANGES = {
    program.AT_LEAST_1: (*SIZES, "kv_heads", "hidden", "predict", "eval_every", "eval_windows", "sample", "top_k",
                         "save_every"),
    program.AT_LEAST_0: ("lr", "warmup", "weight_decay", "clip", "seed", "z_loss"),
    (f"0, or at least {COLDEST}, and finite", lambda value: value == 0 or COLDEST <= value < float("inf")):
        ("temperature",),
    ("above 0, up to 1", lambda value: 0 < value <= 1): ("top_p",),
    program.PROBABILITY: ("dropout", "attention_dropout"),
    program.MORE_THAN_0: ("qk_clip",),
}


def adamw(model, args):
    """AdamW for all parameters."""
    return optim.AdamW(training.decay_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.99))


def adamw8(model, args):
    """The same with state of 8 bits, but for the embeddings', as its paper advises."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    params = list(model.parameters())
    groups = [{**group, "state_bits": bits} for bits, chosen in (
        (8, [p for p in params if id(p) not in tables]), (32, [p for p in params if id(p) in tables]))
        for group in training.decay_groups(chosen, args.weight_decay) if group["params"]]
    return optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.99))


def hidden_and_others(model):
    """(the blocks' matrices, all other parameters)"""
    hidden, others = [], []
    for name, p in model.named_parameters():
        (hidden if p.ndim == 2 and "block" in name else others).append(p)
    return hidden, others


def matrices(make, model, args):
    """An optimizer of matrices for the blocks', AdamW for the embeddings, which are the head as well, biases, norms."""
    hidden, others = hidden_and_others(model)
    return optim.Combined(
        make(hidden, lr=args.lr, weight_decay=args.weight_decay),
        optim.AdamW(training.decay_groups(others, args.weight_decay), lr=args.lr, betas=(0.9, 0.99)))


def adafactor(model, args):
    """Adafactor for all parameters."""
    return optim.Adafactor(training.decay_groups(model, args.weight_decay), lr=args.lr)


def lion(model, args):
    """Lion for all parameters: a fifth of AdamW's rate, and five times its weight decay."""
    return optim.Lion(training.decay_groups(model, 5 * args.weight_decay), lr=args.lr / 5)


AS_ADAMW = {"adjust_lr_fn": "match_rms_adamw"}     # steps about as long
OPTIMIZERS = {
    "adamw": adamw, "adamw8": adamw8, "lion": lion, "adafactor": adafactor,
    "muon": partial(matrices, partial(optim.Muon, **AS_ADAMW)), "normuon": partial(matrices, optim.NorMuon),
    "dion2": partial(matrices, partial(optim.Dion2, **AS_ADAMW)),
    "dion": partial(matrices, partial(optim.Dion, **AS_ADAMW))}


def network(facts, vocabulary, **dropout):
    """The GPT of a run: of {name: setting}, as the run's summary has them, or its command line."""
    sizes = {name: facts[name] for name in BUILT_BY}
    family = sizes.pop("family")
    return nn.GPT(len(vocabulary), **FAMILIES[family] | {"tied": family == "gpt"} | sizes, **dropout)


def with_more_ahead(model, facts):
    """What the run trains: the GPT, or one that predicts more tokens from each position."""
    return model if facts["predict"] == 1 else nn.MultiTokenPrediction(model, facts["predict"] - 1)


class TextTask:
    """Predict each next character of a file."""

    about = None

    def __init__(self, args):
        self.text = read_text(args.text)
        self.vocabulary, self.name, self.units = self.text.vocabulary, Path(args.text).name, args.length
        self.crc32 = training.crc32(self.text.train, sorted(map(ord, self.vocabulary.numbers)))
        windows = Windows(self.text.train, args.length)
        self.inputs, self.targets = windows.inputs, windows.targets
        held_back = Windows(self.text.validation, args.length)
        starts = xp.arange(0, len(held_back.inputs), args.length)[:args.eval_windows]
        self.validation = held_back.inputs[starts], held_back.targets[starts]

    def final(self, model, args, world):
        """A passage that the model writes."""
        start = xp.zeros((1, 1), xp.int64) if "\n" not in self.vocabulary.numbers else \
            self.vocabulary.encode("\n")[None]
        tokens = model.module.generate(start, args.sample, args.temperature, backend.stream("sample", args.seed),
                                       top_k=args.top_k, top_p=args.top_p)
        return {}, self.vocabulary.decode(backend.to(tokens[0], "cpu"))


class PackedTask(TextTask):
    """The same of documents: the stretches of the file between separators, each with one at its end."""

    def __init__(self, args):
        super().__init__(args)
        train, validation = (self.documents(tokens, args.pack) for tokens in (self.text.train, self.text.validation))
        packed, held_back = pack(train, args.length), pack(validation, args.length)
        self.inputs, self.targets, self.units = packed.rows, packed.targets, packed.units
        count = min(args.eval_windows, len(held_back.rows))
        some = xp.arange(count) * len(held_back.rows) // count      # of all lengths: the first rows are the longest's
        self.validation = held_back.rows[some], held_back.targets[some]
        self.about = f"packed: {packed}\none after another: {concatenate(train, args.length)}"

    def documents(self, tokens, separator):
        """Those of some tokens, as tokens."""
        parts = self.vocabulary.decode(tokens).split(separator)
        return [self.vocabulary.encode(part + separator) for part in parts if part]


class AdditionTask:
    """Answer 27+58= with the digits of the sum, last digit first."""

    about = None

    def __init__(self, args):
        self.problems = addition(2, seed=args.seed)
        self.vocabulary, self.name, self.units = self.problems.vocabulary, "addition", 3
        self.inputs, self.targets = self.problems.windows(self.problems.train)
        self.crc32 = training.crc32(self.inputs, self.targets)
        if args.length < self.inputs.shape[1]:
            raise ValueError(f"--length {args.length}: a sum has {self.inputs.shape[1]} characters to be seen at once")
        self.validation = self.problems.windows(self.problems.test)

    def final(self, model, args, world):
        """The share of unseen sums that the model gets right, and some of them."""
        rows, question = self.problems.test, self.problems.question
        mine = rows[world.rank::world.size]
        written = model.module.generate(mine[:, :question], rows.shape[1] - question, temperature=0)
        written = backend.to(written, "cpu")
        right = xp.array([(written == mine).all(1).sum()])
        world.all_reduce(right)
        lines = []
        for row, answer in zip(mine[:8], written[:8], strict=True):
            text = self.vocabulary.decode(answer)
            verdict = "" if (answer == row).all() else f"   wrong: {self.vocabulary.decode(row[question:])[::-1]}"
            lines.append(f"{text[:question]}{text[question:][::-1]}{verdict}")
        return {"unseen_sums_right": 100.0 * int(right[0]) / len(rows)}, "\n".join(lines)


def parse(argv):
    """The command line; what is left out depends on the task."""
    p = program.ArgumentParser(prog="gpt.py", description=__doc__)

    def sizes(*names):
        for name in names:
            p.add_argument(f"--{name.replace('_', '-')}", type=int,
                           help=f"{SIZES[name]} (default: {ADDITION[name]}; with --text {TEXT[name]})")

    p.section("task")
    p.add_argument("--text", help="a UTF-8 file to learn (default: addition problems)")
    p.add_argument("--pack", nargs="?", const="\n\n", metavar="SEPARATOR",
                   help="of the text's documents, which are what stands between separators (a blank line, if none is "
                   "given): several to a row, none of which looks into another")
    p.section("model")
    sizes("length", "layers", "heads", "dim")
    p.add_argument("--kv-heads", type=int, help="heads of keys and values, fewer than heads for grouped queries")
    p.add_argument("--window", metavar="N", help="characters that one sees at most, itself among them (default: all); "
                   "several, by commas, for one block after another, and again from the first: 16,16,all; "
                   "4x16: 4 blocks of 16, which it chooses; linear: all, kept as a state of fixed size; delta: the "
                   "same, what is under a key is replaced")
    p.add_argument("--qk-norm", action="store_true", help="norms of each head's queries and keys")
    p.add_argument("--gated", action="store_true", help="what each head finds is multiplied by sigmoids of gates")
    p.add_argument("--family", choices=list(FAMILIES), default="gpt",
                   help="llama: rotary positions, RMS norms, SwiGLU, no biases, an output layer of its own; deepseek: "
                   "multi-head latent attention besides")
    p.add_argument("--hidden", type=int, help="features within the feed-forward (default: 4 · dim; a llama's, which "
                   "has a gate as well, 8/3 · dim, up to a multiple of 16)")
    p.add_argument("--predict", type=int, default=1, help="tokens that training predicts from each position: with 2 "
                   "and more the loss has 0.3 times the mean of the others' than the next one's, which are left out "
                   "afterwards")
    p.add_argument("--positions", choices=["learned", "rotary"], help="how positions are told (default: the family's)")
    p.add_argument("--norm", choices=["layer", "rms"], help="which norm (default: the family's)")
    p.add_argument("--dropout", type=float, default=0.0, help="probability to drop a unit")
    p.add_argument("--attention-dropout", type=float, default=0.0, help="probability to drop a weight of attention")
    p.section("training")
    sizes("steps", "batch_size")
    p.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw",
                   help="adamw8: with state of 8 bits; lion: with a fifth of AdamW's rates and half of its state; "
                   "adafactor: by rates in proportion to the parameters, say --lr 0.03; muon: the blocks' matrices by "
                   "Muon, with AdamW's rates, and the rest by AdamW; normuon: so, all neurons equally far; dion2: so, "
                   "a quarter of each matrix; dion: so, in a quarter of its directions, by gradients that aren't "
                   "summed, nor clipped")
    p.add_argument("--lr", type=float, help=f"learning rate (default: {ADDITION['lr']}; with --text {TEXT['lr']})")
    p.add_argument("--schedule", choices=list(optim.SCHEDULES), default="cosine", help="of the learning rate, after "
                   "the warmup, to a tenth; wsd: it stays, and falls over the last fifth")
    p.add_argument("--warmup", type=int, help="steps over which the learning rate rises (default: 100 or half of the "
                   "run)")
    p.add_argument("--weight-decay", type=float, default=0.1, help="of matrices")
    p.add_argument("--clip", type=float, default=1.0, help="greatest global norm of the gradients")
    p.add_argument("--z-loss", type=float, default=0.0, help="weight of log² Σ exp(logits), say 1e-4: logits that "
                   "drift are brought back")
    p.add_argument("--qk-clip", type=float, metavar="SCORE", help="the greatest that attention's scores may come to, "
                   "say 100: after each step heads above it get smaller weights; with the norms of --qk-norm there is "
                   "nothing to clip")
    p.add_spikes()
    p.add_argument("--amp", choices=["float16", "bfloat16"],
                   help="mixed precision: autocast and, in float16, a GradScaler")
    p.add_argument("--seed", type=int, default=0, help="of initial values, order, dropout and text")
    p.section("looked at, and written")
    p.add_argument("--eval-every", type=int, default=250, help="steps between validations")
    p.add_argument("--eval-windows", type=int, default=512, help="windows of the validation text to look at")
    p.add_argument("--sample", type=int, default=400, help="characters to write at the end, with --text")
    p.add_argument("--temperature", type=float, default=0.8, help="of that text; 0 takes the likeliest character")
    p.add_argument("--top-k", type=int, help="draw its characters from so many, the likeliest")
    p.add_argument("--top-p", type=float, help="draw them from the likeliest that together are so probable")
    p.section("ranks and devices")
    p.add_argument("--exact", action="store_true", help="the same bits on 1, 2, 4 or 8 ranks (slower)")
    p.add_argument("--device", default="cpu", help="cpu, cuda (a node's ranks take its GPUs in turn) or cuda:NUMBER")
    p.add_argument("--compile", action="store_true", help="run model and optimizer as fused kernels: mt.compile")
    p.add_argument("--out", type=Path, help="folder for the run's files (default: runs/gpt-TASK-RANKS)")
    p.add_mfu()
    p.add_checks()
    p.add_checkpoints()
    args = p.parse_args(argv)
    for name, value in (TEXT if args.text else ADDITION).items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    for name, usual in {"positions": "learned", "norm": "layer"}.items():
        setattr(args, name, getattr(args, name) or FAMILIES[args.family].get(name, usual))
    if args.hidden is None:
        args.hidden = 4 * args.dim if args.family == "gpt" else -(-8 * args.dim // 48) * 16
    args.window = p.windows(args.window)
    p.check_ranges(args, RANGES)
    if args.mfu and args.predict > 1:
        p.error(f"--mfu --predict {args.predict}: the operations of tokens further ahead are not counted")
    if args.pack is not None and not (args.text and args.pack):
        p.error("--pack wants a --text, and a SEPARATOR of a character or more")
    if args.pack and any(map(blocks_of, windows_of(args.window))):
        p.error(f"--pack --window {as_text(args.window)}: blocks that are chosen would be of several documents")
    p.check_needs(args, {"--text": (args.text, ["eval_windows", "sample", "temperature", "top_k", "top_p"])})
    return args


def loss_sum(model, shard, z_loss=0.0):
    """The sum of the shard's losses, with --predict also of the tokens further ahead."""
    predicted = logits(model, shard.inputs)
    if not isinstance(predicted, tuple):
        return nn.cross_entropy(predicted, shard.labels, reduction="sum", z_loss=z_loss)
    return nn.multi_token_loss(predicted, shard.labels, apart(shard.inputs)[1] if shard.inputs.ndim == 3 else None,
                               z_loss=z_loss)


def logits(model, inputs):
    """Of tokens (batch, time), or of packed rows (batch, time, 2)."""
    return model(*apart(inputs)) if inputs.ndim == 3 else model(inputs)


def clip_others(max_norm, model):
    """Clip all gradients but those that Dion adds up in its step. Returns their norm."""
    return optim.clip_grad_norm_(hidden_and_others(model)[1], max_norm)


def clipped(clip, spike):
    """A step is done, or left out: clip its scores, and say in the history how large they were, and of how many heads
    they were too large."""
    if spike:
        clip.forget()
        return {}
    scores = clip.step()
    return {"greatest_score": scores.greatest, "heads_clipped": len(scores.clipped)}


def validation_loss(model, task, world):
    """Mean loss per target of the held-back samples; ranks share fixed chunks, sums are added in one order."""
    device = next(model.parameters()).device
    inputs, targets = (backend.to(a, device) for a in task.validation)
    model.eval()
    mine = {}
    with mt.no_grad():
        for i in range(world.rank * EVAL_CHUNK, len(inputs), world.size * EVAL_CHUNK):
            chunk = slice(i, i + EVAL_CHUNK)
            mine[i] = nn.cross_entropy(logits(model, inputs[chunk]), targets[chunk], reduction="sum").item()
    model.train()
    sums = {i: s for part in world.all_gather_object(mine) for i, s in part.items()}
    return sum(sums[i] for i in sorted(sums)) / int((task.validation[1] != IGNORED).sum())


def prepare(args, world):
    """All that training needs, and nothing begun. ValueError or OSError on all ranks where something doesn't fit."""
    device = program.take_device(args.device, world)
    if args.exact:
        training.prepare_exact(world)
    task = AdditionTask(args) if not args.text else TextTask(args) if args.pack is None else PackedTask(args)
    if args.predict > task.inputs.shape[1]:
        raise ValueError(f"--predict {args.predict}: a sample has {task.inputs.shape[1]} characters")
    args.out = args.out or Path("runs") / f"gpt-{Path(task.name).stem}-{world.size}"
    loader = Loader(task.inputs, task.targets, args.batch_size, seed=args.seed, rank=world.rank, size=world.size,
                    micro_shards=8 if args.exact else 1)
    mt.manual_seed(args.seed)
    model = network(vars(args), task.vocabulary, dropout=args.dropout,
                    attention_dropout=args.attention_dropout).to(device)
    row = backend.to(task.inputs[:1], device)
    use = utilization.measure(world, model, *(apart(row) if row.ndim == 3 else [row]), dtype=args.amp or xp.float32,
                              device=device) if args.mfu else None
    model = with_more_ahead(model, vars(args)).to(device)
    model = mt.compile(model) if args.compile else model
    unsummed = hidden_and_others(model)[0] if args.optimizer == "dion" and not args.exact else ()
    model = DistributedDataParallel(model, world, exact=args.exact, unsummed=unsummed)
    optimizer = OPTIMIZERS[args.optimizer](model, args)
    if args.compile and args.optimizer != "adafactor":
        mt.compile(optimizer)
    args.warmup = program.warmup(args.warmup, 100, args.steps)
    schedule = optim.LambdaLR(optimizer, optim.SCHEDULES[args.schedule](args.steps, args.warmup, final=0.1))
    losses = partial(loss_sum, z_loss=args.z_loss)
    clip = QKClip(model, args.qk_clip) if args.qk_clip else None
    checks = Checks(args, world, model, args.steps, losses, seed=args.seed, amp=args.amp)
    settings = {name: value for name, value in vars(args).items() if name not in OUTSIDE} | {"data_crc32": task.crc32}
    run = training.Run(args.out, world, settings, args.resume, args.async_save, bool(args.save_every))
    scaler = optim.GradScaler(comm=world) if args.amp == "float16" else None
    spikes = optim.SpikeGuard(args.skip_spikes) if args.skip_spikes else None
    run.restore(model, optimizer, schedule, scaler, **{"spikes": spikes} if spikes else {})
    return task, loader, model, losses, optimizer, schedule, scaler, spikes, clip, checks, run, use


def train(args, world):
    """Train, sample, and return the summary."""
    with program.usage_errors("gpt.py"):
        task, loader, model, losses, optimizer, schedule, scaler, spikes, clip, checks, run, use = prepare(args, world)
    stop, curve = False, run.facts.get("validation", [])
    norm_clip = partial(clip_others, args.clip) if args.optimizer == "dion" else args.clip
    with run, program.Progress(world, args.steps) as progress, program.Interrupt() as interrupt:
        progress.say(f"{task.name}: {len(task.inputs):,} samples, {len(task.vocabulary)} characters; "
                     f"{sum(p.size for p in model.parameters()):,} parameters, {world.size} "
                     f"rank{'s' * (world.size > 1)}, {args.steps:,} steps of {args.batch_size}"
                     + f", from step {run.step:,} on" * run.resume)
        if task.about:
            progress.say(task.about)
        batches = ((epoch, batch) for epoch, part in run.epochs(loader, args.steps) for batch in part)
        checks.begin()
        for epoch, batch in batches:
            begin = time.perf_counter()
            loss, stop = training.train_step(model, optimizer, batch, losses, world, seed=args.seed, step=run.step,
                                             units=task.units, clip=norm_clip, stop=interrupt.wanted, amp=args.amp,
                                             scaler=scaler, spikes=spikes)
            schedule.step()
            spike = spikes.at(run.step + 1) if spikes else None
            more = clipped(clip, spike) if clip else {}
            run.log(loss, epoch, batch.count, begin, **more)
            progress.step(loss)
            if spike:
                progress.say(str(spike))
            last = stop or run.step == args.steps
            if last or run.step % args.eval_every == 0:
                curve.append((run.step, validation_loss(model, task, world)))
                progress.say(f"step {run.step:,} of {args.steps:,}: loss {loss:.3f}, validation {curve[-1][1]:.3f} "
                             f"nats per character, {run.speed * task.units:,.0f} characters/s")
            saves = stop or run.due(args.save_every, args.steps)
            checks.after(run.step, batch, saves, progress.say)
            if saves:
                run.save(model, optimizer, scaler, validation=curve, **{"spikes": spikes} if spikes else {})
            if last:
                break
        if stop:
            progress.say(interrupt.said(run, args.steps))
        facts, passage = task.final(model, args, world)
        progress.say(passage)
        checks.end(progress.say)
        if use:
            progress.say(use.told(run.speed))
        status = interrupt.status(world)
    settings = {k: v for k, v in vars(args).items()
                if k not in ("out", "steps", "resume", "save_every", "async_save", "mfu", *program.CHECKS)}
    return run.finish(model, data=task.name, validation_loss=curve[-1][1], validation=curve, interrupted=stop,
                      exit_status=status, **use.facts(run.speed) if use else {}, **facts, **settings,
                      **{"left_out": [spike.step for spike in spikes.found]} if spikes else {})


def main(argv=None):
    """The program; returns the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM. SystemExit(2) for what can't be
    trained, SystemExit(1) where the loss is no number any more."""
    with program.usage_errors("gpt.py"):
        world = comm.world()
        args = parse(argv)
    summary = train(args, world)
    if world.rank == 0:
        viz.learning_curve(viz.read_run(args.out), args.out / "curve.png")
        if "unseen_sums_right" in summary:
            print(f"{summary['unseen_sums_right']:.1f} % of the sums that it has never seen are right")
        print(f"validation loss {summary['validation_loss']:.3f} nats per character, parameters "
              f"{summary['parameters_sha256'][:12]}, curve in {args.out / 'curve.png'}")
    world.barrier()     # while rank 0 draws no other may end, which after a signal would end the job
    return summary["exit_status"]


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
