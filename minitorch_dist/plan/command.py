"""`python -m minitorch_dist plan`: the command line of plans, and their tables."""

import sys
from dataclasses import replace
from math import isfinite, prod

from ..compress.lora import TARGETS
from ..nn.transformer import FAMILIES
from ..nn.windows import read_windows
from ..parallel.context.context import HOW
from ..parallel.pipelines.schedules import SCHEDULES
from ..parallel.tensor.sequence_parallel import check_choice
from ..tables import aligned
from .adapters import Parameter, counts
from .devices import DEVICES, device_named
from .generation import Generation
from .job import PRECISIONS, Job
from .meshes import every
from .model import GPT, LATENT, Parameters
from .optimizers import OPTIMIZERS, is_matrix, per_element, takes_pieces
from .paper import gpu_hours, plan
from .refused import EXPERTS_OVER
from .sent import AXES

SHAPE = ("layers", "width", "heads", "vocabulary", "context")
MORE = ("kv_heads", "hidden", "family", "experts", "top_k", "capacity_factor", "group", "shared_experts", "predict",
        "window", "qk_norm", "attention_dropout", "sinks", "gated", *LATENT)      # of a GPT, where they aren't usual
SHOWN = 12      # of all meshes
UNITS = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB"}
UNKNOWN = "Bytes are those of the ZeRO paper, without padding. A model that isn't known has no activations here."
COUNTED = ("Exact counts, padding included: parameters, gradients, optimizer, bytes sent. Buffers, beside them for a "
           "while:\nat most.")
ACTIVATIONS = {"float32": "Activations: exact, what this library's tape keeps on the CPU.",
               "mixed": "Activations: a model, Megatron-LM's (Korthikanti et al. 2022)."}
NOT_RUN = "The counts are of this library's layout, which itself trains several ranks in float32."
TIME = ("Seconds: a model. Matrix products at the device's peak (real programs reach a third to a half: --flops), "
        "rings at full\nbandwidth, equal stages and slices, nothing overlaps.")
ALIKE = "Experts without a capacity: as if all were used alike."
FROZEN = "Frozen: no gradient, no optimizer; sent in stage 3 only. Buffers: the largest matrix of 4 bits, taken apart."
ALL_IN_4 = "In 4 bits is all that is frozen: embeddings and norms too, which QLoRA leaves in 16."
WRITTEN = ("Written: exact, what weights and cache take, and what the last token reads of them; its speed: a bound, by "
           "the memory's\nbandwidth alone.")
UPDATE = ("Update: the optimizer's products of matrices, the busiest rank's, in float32, as this library makes them; "
          "what\nthey are made in isn't counted.")
LINES = "Rows and columns of Dion2's steps: as if each rank had as many of them."
HOST = "Host: of offload; its seconds are those of the copies at full PCIe speed, without the update itself."


def add_command(commands):
    """Add `plan` to the subparsers of the command line."""
    p = commands.add_parser("plan", help="memory, bytes on the wire and time of a training run, on paper")
    p.section("devices")
    p.add_argument("--devices", type=int, required=True, help="how many")
    p.add_argument("--device", default="H100", help=f"which: {', '.join(DEVICES)} (default: H100)")
    p.add_argument("--memory", type=float, help="bytes that a device has, instead of its own")
    p.add_argument("--flops", type=float, help="FLOP/s that a device does, instead of its peak")
    p.add_argument("--bandwidth", type=float, help="bytes/s of every link, instead of those in and between machines")
    p.add_argument("--host-bandwidth", type=float, help="bytes/s to the host and back, instead of its PCIe's")
    p.add_argument("--memory-bandwidth", type=float, help="bytes/s of a device's memory, instead of its own")
    p.section("model")
    p.add_argument("--parameters", type=float, help="of a model of which no more is known, e.g. 7.5e9")
    for name in SHAPE:
        p.add_argument(f"--{name}", type=int, help="of a GPT")
    p.add_argument("--kv-heads", type=int, help="heads of keys and values, which groups of queries share")
    p.add_argument("--hidden", type=int, help="features within the feed-forward (default: 4 · width)")
    p.add_argument("--family", help=f"of what the model is made: {', '.join(FAMILIES)} (default: gpt)")
    for name in LATENT:
        p.add_argument(f"--{_spelt(name)}", type=int, help="of a deepseek's attention; see nn/latent.py")
    p.add_argument("--window", metavar="N", help="positions that one sees at most, itself among them (default: all); "
                   "several, by commas, for one block after another, and again from the first: 1024,1024,all; 4x64: "
                   "4 blocks of 64, which it chooses; linear, delta: attention by states")
    p.add_argument("--qk-norm", action="store_const", const=True, help="norms of each head's queries and keys")
    p.add_argument("--sinks", action="store_const", const=True, help="attention has one per head, which all scores are "
                   "made for")
    p.add_argument("--gated", action="store_const", const=True, help="what attention's heads find is gated")
    p.add_argument("--attention-dropout", action="store_const", const=True, help="attention's weights are dropped, too")
    p.add_argument("--no-dropout", action="store_true", help="the GPT has none, so that no masks are kept")
    p.add_argument("--untied", action="store_true", help="the output layer has a matrix of its own")
    p.add_argument("--predict", type=int, help="tokens that training predicts from each position (default: 1); see "
                   "nn/multi_token.py")
    p.section("mixture of experts")
    p.add_argument("--experts", type=int, help="of every block's mixture, in the place of its feed-forward")
    p.add_argument("--top-k", type=int, help="experts per token (default: 2)")
    p.add_argument("--capacity-factor", type=float, help="places of an expert, over what balance needs (default: 1.25)")
    p.add_argument("--no-capacity", action="store_true", help="an expert takes all tokens that choose it")
    p.add_argument("--group", help="of tokens that are routed together: sequence (default: those of a micro-batch)")
    p.add_argument("--dispatch-bits", type=int, help="of rows on their way to experts, and of their answers' "
                   "gradients: 8 or 4")
    p.add_argument("--dispatch-once", action="store_true", help="a token goes to a rank once, however many of its "
                   "experts are there; with --no-capacity")
    p.add_argument("--experts-over", nargs="+", choices=list(EXPERTS_OVER), default=[], help="these ranks divide "
                   "experts, too, and route their own positions; with --no-capacity, tp with --sequence-parallel")
    p.add_argument("--shared-experts", type=int, help="beside them, which every token goes through")
    p.section("ranks")
    p.add_argument("--dp", type=int, help="ranks that divide the samples (default: what the others leave)")
    p.add_argument("--tp", type=int, default=1, help="ranks that divide the matrices")
    p.add_argument("--pp", type=int, default=1, help="ranks that divide the layers")
    p.add_argument("--cp", type=int, default=1, help="ranks that divide each sequence; with --meshes: at most so many")
    p.add_argument("--cp-by", default="ring", help=f"how they attend: {', '.join(HOW)} (default: ring)")
    p.add_argument("--ep", type=int, default=1, help="ranks that divide experts and samples; with --meshes: at most")
    p.add_argument("--sequence-parallel", nargs="?", const=True, default=False, metavar="regather",
                   help="divide what tensor parallelism leaves whole; regather: and gather again in backward")
    p.add_argument("--meshes", action="store_true", help="try all meshes, and show the fastest; needs --batch")
    p.section("pipeline")
    p.add_argument("--schedule", default="1f1b", help=f"of the pipeline: {', '.join(SCHEDULES)}")
    p.add_argument("--chunks", type=int, default=1, help="of layers, per rank, in interleaved")
    p.add_argument("--slices", type=int, default=1, help="in which sequences go through it, one after another")
    p.section("state")
    p.add_argument("--stage", type=int, help="of ZeRO, 0 to 3 (default: all that the mesh allows)")
    p.add_argument("--shard-over", type=int, help="ranks that share a copy of what ZeRO cuts (default: all)")
    p.add_argument("--reshard-after-forward", type=int, metavar="RANKS", help="stage 3: so many neighbours, say a "
                   "node's, keep the values from forward to backward (hpZ)")
    p.add_argument("--param-bits", type=int, help="stage 3: of values on their way: 8 or 4 (qwZ)")
    p.add_argument("--reduce-bits", type=int, help="of gradients on their way: 8 or 4 (qgZ)")
    p.add_argument("--precision", default="mixed", help="mixed (2+2+12 bytes per parameter) or float32 (4+4+8)")
    p.add_argument("--optimizer", default="adam", help=f"which: {', '.join(OPTIMIZERS)} (default: adam); from muon on: "
                   "of the blocks' matrices, beside AdamW of all else")
    p.add_argument("--fraction", type=float, help="of a matrix's lines, or directions, in a step of dion2, or dion "
                   "(default: 0.25)")
    p.add_argument("--state-bits", type=int, default=32, help="of its numbers per parameter; 8: of Adam's two 2.5 "
                   "bytes instead of 8")
    p.add_argument("--offload-optimizer", action="store_true", help="its state lies on the host, which updates")
    p.section("step")
    p.add_argument("--batch", type=int, help="samples per step, over all ranks (default: one per micro-batch)")
    p.add_argument("--micro-batches", type=int, help="pieces of a rank's samples (default: 1; 4 per pipeline stage)")
    p.add_argument("--sequence-length", type=int, help="tokens of a sample (default: the context; 2,048)")
    p.add_argument("--checkpointing", action="store_true", help="keep the blocks' inputs alone, and compute twice")
    p.add_argument("--tiled-loss", action="store_true", help="make the loss by tiles of the vocabulary: no logits are "
                   "kept, and they are made twice")
    p.section("adapters")
    p.add_argument("--lora-rank", type=int, help="of adapters, which are all that is trained: LoRA")
    p.add_argument("--lora-targets", nargs="+", metavar="PATTERN",
                   help=f"beside which matrices of a GPT (default: {' '.join(TARGETS)})")
    p.add_argument("--base-bits", type=int, help="of these matrices: 4 is QLoRA, NF4 with double quantisation "
                   "(default: 16 in mixed, 32 in float32)")
    p.add_argument("--lora-parameters", type=float, help="of all adapters, beside --parameters")
    p.section("what else to work out")
    p.add_argument("--tokens", type=float, help="of the whole run, e.g. 2e12: how long it takes")
    p.add_argument("--generate", metavar="SEQUENCESxTOKENS", help="write so many sequences of so many tokens "
                   "at once, on the same ranks: the cache, and what a token reads")
    p.set_defaults(run=_show)


def _show(args):
    try:
        text = mesh_lines(args) if args.meshes else lines(plans_of(args), args.tokens, args.generate)
    except ValueError as error:
        print(f"minitorch-dist plan: {error}", file=sys.stderr)
        return 2
    print("\n".join(text))
    return 0


# ---------------------------------------------------------------- from the command line to plans

def plans_of(args):
    """[Plan], one per stage. ValueError for what can't be planned."""
    _check_numbers(args)
    device, model = _device(args), _model(args)
    others = args.tp * args.pp * args.cp * args.ep
    dp = args.devices // others if args.dp is None else args.dp
    if dp * others != args.devices:
        more = "".join(f" × {name}={getattr(args, name)}" for name in ("cp", "ep") if getattr(args, name) > 1)
        raise ValueError(f"the mesh dp={'?' if args.dp is None else dp} × tp={args.tp} × pp={args.pp}{more} doesn't "
                         f"make up {args.devices} devices: their product must be {args.devices}")
    micro_batches = (4 * args.pp if args.pp > 1 else 1) if args.micro_batches is None else args.micro_batches
    possible = 1 if dp * args.cp * args.ep == 1 or not takes_pieces(args.optimizer) else 4
    least = 3 if args.reshard_after_forward or args.param_bits else int(bool(args.shard_over or args.reduce_bits))
    stages = range(min(least, possible - 1), possible) if args.stage is None else [args.stage]
    batch = dp * args.ep * micro_batches if args.batch is None else args.batch
    job = Job(model, dp, args.tp, args.pp, stages[0], args.precision, batch, _time(args, model), micro_batches,
              args.schedule, args.chunks, args.checkpointing, args.sequence_parallel, args.cp, args.cp_by, args.ep,
              args.offload_optimizer, args.shard_over, args.state_bits, tiled_loss=args.tiled_loss,
              reshard_after_forward=args.reshard_after_forward, param_bits=args.param_bits,
              reduce_bits=args.reduce_bits, dispatch_bits=args.dispatch_bits, dispatch_once=args.dispatch_once,
              experts_over=tuple(args.experts_over), optimizer=args.optimizer, fraction=args.fraction,
              slices=args.slices, **_lora(args))
    return [plan(replace(job, stage=stage), device) for stage in stages]


def generation_of(job, device, text):
    """A Generation, of SEQUENCESxTOKENS. ValueError for another text."""
    numbers = text.split("x")
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise ValueError(f"--generate {text}: give SEQUENCESxTOKENS, two whole numbers such as 16x4096")
    return Generation(job, device, *map(int, numbers))


def every_of(args):
    """([Plan] of every mesh, [why not] of those that can't be). ValueError where none can."""
    _check_numbers(args)
    given = {"--dp": args.dp is not None, "--tp": args.tp > 1, "--pp": args.pp > 1, "--chunks": args.chunks != 1,
             "--slices": args.slices != 1, "--schedule": args.schedule != "1f1b", "--tokens": args.tokens is not None,
             "--shard-over": args.shard_over is not None, "--generate": args.generate is not None,
             **{f"--{_spelt(name)}": getattr(args, name) is not None
                for name in ("reshard_after_forward", "param_bits", "reduce_bits", "dispatch_bits")},
             "--dispatch-once": args.dispatch_once, "--experts-over": bool(args.experts_over)}
    if any(given.values()):
        raise ValueError("--meshes tries all of them, with 1f1b, and compares a step: leave "
                         f"{' '.join(name for name, it in given.items() if it)} out")
    if args.batch is None:
        raise ValueError("--meshes compares them with one batch: give --batch")
    device, model = _device(args), _model(args)
    job = Job(model, batch=args.batch, precision=args.precision, time=_time(args, model), stage=args.stage or 0,
              micro_batches=1 if args.micro_batches is None else args.micro_batches, checkpointing=args.checkpointing,
              cp_by=args.cp_by, offload_optimizer=args.offload_optimizer, state_bits=args.state_bits,
              tiled_loss=args.tiled_loss, optimizer=args.optimizer, fraction=args.fraction, **_lora(args))
    check_choice("--sequence-parallel", args.sequence_parallel)
    plans, refused = every(job, device, args.devices, None if args.stage is None else [args.stage],
                              args.micro_batches, args.sequence_parallel, args.cp, args.ep)
    if not plans:
        raise ValueError(f"no mesh of {args.devices} devices can train this with a batch of {args.batch}. The first: "
                         f"{refused[0]}")
    return plans, refused


def _check_numbers(args):
    for name in ("parameters", "memory", "flops", "bandwidth", "host_bandwidth", "memory_bandwidth", "tokens",
                 "lora_parameters"):
        value = getattr(args, name)
        if value is not None and not (isfinite(value) and value > 0):
            raise ValueError(f"--{_spelt(name)} {value}: must be a positive number")
    for name in ("devices", "tp", "pp", "cp", "ep"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least 1")


def _lora(args):
    targets = None if args.lora_targets is None else tuple(args.lora_targets)
    return {"lora_rank": args.lora_rank, "lora_targets": targets, "base_bits": args.base_bits,
            "lora_parameters": args.lora_parameters}


def _spelt(name):
    return name.replace("_", "-")


def _time(args, model):
    if args.sequence_length is None:
        return 2048 if model.layers is None else model.context
    return args.sequence_length


def _device(args):
    device = device_named(args.device)
    if args.memory:
        device = replace(device, memory=args.memory)
    if args.flops:
        device = replace(device, flops=dict.fromkeys(PRECISIONS, args.flops))
    if args.host_bandwidth:
        device = replace(device, host=args.host_bandwidth)
    if args.memory_bandwidth:
        device = replace(device, memory_bandwidth=args.memory_bandwidth)
    return replace(device, link=args.bandwidth, network=args.bandwidth) if args.bandwidth else device


def _model(args):
    given = [f"--{name}" for name in SHAPE if getattr(args, name) is not None]
    more = {name: getattr(args, name) for name in MORE if getattr(args, name) is not None}
    flags = {name: f"--{_spelt(name)}" for name in more}
    if args.no_capacity:
        if args.capacity_factor is not None:
            raise ValueError(f"--no-capacity and --capacity-factor {args.capacity_factor:g}: take one")
        more["capacity_factor"], flags["capacity_factor"] = None, "--no-capacity"
    if args.parameters is not None:
        given += flags.values()
        if given := given + ["--untied"] * args.untied + ["--no-dropout"] * args.no_dropout:
            raise ValueError(f"--parameters and {' '.join(given)}: the latter are a GPT's, give one or the other")
        return Parameters(args.parameters)
    if len(given) < len(SHAPE):
        missing = [f"--{name}" for name in SHAPE if f"--{name}" not in given]
        raise ValueError(f"the model is missing {' '.join(missing)}: give --parameters, or all of a GPT's "
                         f"{' '.join(f'--{name}' for name in SHAPE)}")
    if lost := [flags[name] for name in ("top_k", "capacity_factor", "group", "shared_experts")
                if name in more and not args.experts]:
        raise ValueError(f"{' '.join(lost)} without --experts: say how many there are")
    return GPT(**{name: getattr(args, name) for name in SHAPE}, tied=not args.untied, dropout=not args.no_dropout,
               **more | {"window": read_windows(args.window)})


# ---------------------------------------------------------------- from plans to lines

def lines(plans, tokens=None, generate=None):
    """The report on plans that differ in their stage alone; tokens, generate: as on the command line."""
    job, device = plans[0].job, plans[0].device
    work = job.batch * job.time
    flops = sum(rank.flops for rank in plans[0].ranks) * job.ranks / job.pp
    found = [f"{job.model}", *trained_lines(job), *optimizer_lines(job),
             f"{job.ranks:,} × {device.name}, {job.mesh()}; {job.precision}: "
             f"{' + '.join(map(str, job.sizes.values()))} bytes per {'trained ' * job.frozen}parameter"
             f"{of_matrices(job)}",
             f"a step: {job.batch:,} sample{'s' * (job.batch > 1)} of {job.time:,} tokens, {flops:.4g} FLOPs "
             f"({rule_of_thumb(job)[0]}: {rule_of_thumb(job)[1] * work:.4g})"
             + (f"; pipeline: {job.micro_batches} micro-batches{f' in {job.slices} slices' * (job.slices > 1)}, bubble "
                f"{100 * plans[0].bubble:.1f} %" if job.pp > 1 else ""), ""]
    found += [*held_table(plans), "", *time_table(plans), ""]
    if tokens:
        best = min(plans, key=lambda p: (not p.fits, p.seconds.step))
        steps = tokens / work
        hours, bare = steps * best.seconds.step / 3600, gpu_hours(flops * steps, device.flops[job.precision])
        found += [f"{tokens:.4g} tokens: {flops * steps:.4g} FLOPs, {bare:,.0f} device hours of computing alone; in "
                  f"stage {best.job.stage} {steps:,.0f} steps, {hours:,.1f} h, {hours * job.ranks:,.0f} device hours.",
                  ""]
    written = [] if generate is None else [generation_of(job, device, generate)]
    found += [line for it in written for line in (*generation_table(it), "")]
    return [*found, *notes(job), *[WRITTEN] * len(written)]


def rule_of_thumb(job):
    """(as text, FLOPs per token) of a step, of Kaplan et al. 2020: of a frozen parameter backward has one product."""
    count = job.model.active if job.model.experts else job.model.count
    return ("4·N·D", 4 * count) if job.frozen else ("6·N·D", 6 * count)


def trained_lines(job):
    """What is trained and what is frozen, where not all is trained."""
    if not job.frozen:
        return []
    bits, count = 8 * job.sizes["parameter"], job.model.count
    if job.model.layers is None:
        trained, beside, what = job.lora_parameters, count, "adapters"
        each = 8 * job.frozen_itemsize
    else:
        trained, beside, nbytes = counts(job.model, job.adapters)
        what, each = f"adapters of rank {job.lora_rank} beside {', '.join(job.adapters.layers)}", 8 * nbytes / beside
    apart = job.frozen_bits == 4 and count > beside
    return [f"trained: {what}: {trained:,.0f} parameters, {100 * trained / (count + trained):.3g} %",
            f"frozen: {beside:,.0f} parameters of {each:.4g} bits, {count - beside:,.0f} of {bits}" if apart else
            f"frozen: {count:,.0f} parameters of {each:.4g} bits"]


def optimizer_lines(job):
    """Which optimizer it is, and of how many parameters, where it isn't Adam."""
    kind = OPTIMIZERS[job.optimizer]
    if kind.matrices is None or not kind.matrices.hidden:
        return [f"optimizer: {kind.text}"] * (job.optimizer != "adam")
    mine = sum(prod(shape) for name, shape in job.model.whole if is_matrix(job, Parameter(name, shape, 0)))
    return [f"optimizer: {kind.text} of the blocks' matrices, {mine:,} parameters; AdamW of the others, "
            f"{job.model.count - mine:,}"]


def of_matrices(job):
    """How many bytes of state such a parameter has, if that is another number, as text."""
    if OPTIMIZERS[job.optimizer].matrices is None:
        return ""
    return f", {per_element(job, matrix=True)} of the last in {OPTIMIZERS[job.optimizer].text}'s matrices"


def notes(job):
    """Which figures are exact and which are models, as lines."""
    if job.model.layers is None:
        four = [ALL_IN_4] * (job.frozen and job.frozen_bits == 4)
        return [UNKNOWN, *four, TIME, *[HOST] * job.offload_optimizer]
    return [f"{COUNTED} {ACTIVATIONS[job.precision]}",
            *[ALIKE] * (job.model.capacity_factor is None and job.expert_ranks > 1), *[FROZEN] * job.frozen,
            *[NOT_RUN] * (job.precision == "mixed"), *[LINES] * (job.optimizer == "dion2"), TIME,
            *[UPDATE] * updates(job), *[HOST] * job.offload_optimizer]


def updates(job):
    """Whether products of matrices are counted of the optimizer."""
    kind = OPTIMIZERS[job.optimizer].matrices
    return kind is not None and kind.hidden


def mesh_lines(args):
    """The report on every mesh."""
    plans, refused = every_of(args)
    job, device = plans[0].job, plans[0].device
    unit, fit = _held_unit(plans), sum(p.fits for p in plans)
    order = "those come first, the fastest first" if fit else "first come those that hold least"
    rows = [["mesh", "", "micro-batches", f"{UNITS[unit]} held", f"of {device.memory / unit:,.0f}", "s per step",
             "longest"]]
    for p in plans[:SHOWN]:
        rows.append([p.job.mesh(), _name(p), f"{p.job.micro_batches}", f"{p.fullest.memory / unit:,.2f}", _fits(p),
                     f"{p.seconds.step:.3g}", p.seconds.longest])
    return [f"{job.model}", *trained_lines(job), *optimizer_lines(job),
            f"{args.devices:,} × {device.name}; {job.precision}; a step: {job.batch:,} samples of {job.time:,} tokens",
            "", *aligned(rows), "",
            f"{len(plans)} ways, of which {fit} fit; {order}.",
            *([] if fit else ["Less is held with more --micro-batches, --checkpointing, --sequence-parallel."]),
            *([f"{len(refused)} more can't be. The first: {refused[0]}"] if refused else []), "", *notes(job)]


def _fits(p):
    return "fits" if p.fits else "too much"


def held_table(plans):
    """What the fullest rank holds, as lines."""
    unit = _held_unit(plans)
    known = plans[0].fullest.activations is not None
    kinds = ("parameters", "gradients", "optimizer", *(("buffers", "activations") if known else ()))
    host = ["host"] * plans[0].job.offload_optimizer
    rows = [[f"{UNITS[unit]} held", *kinds, "together", f"of {plans[0].device.memory / unit:,.0f}", *host]]
    for p in plans:
        rows.append([_name(p), *(f"{getattr(p.fullest, kind) / unit:,.2f}" for kind in kinds),
                     f"{p.fullest.memory / unit:,.2f}", _fits(p),
                     *(f"{getattr(p.fullest, kind) / unit:,.2f}" for kind in host)])
    return aligned(rows)


def time_table(plans):
    """What is sent, and how long a step takes, as lines."""
    job = plans[0].job
    axes = [axis for axis in AXES if any(p.sent(axis) for p in plans)]
    sent = {axis: [p.sent(axis) for p in plans] for axis in axes}
    if job.offload_optimizer:
        sent["host"] = [max(rank.crossing for rank in p.ranks) for p in plans]
    unit = _unit(max(map(max, sent.values()), default=0))
    parts = ("compute", *axes, *["bubble"] * (job.pp > 1), *["host"] * job.offload_optimizer,
             *["update"] * updates(job))
    rows = [["per step", *(f"{UNITS[unit]} sent {axis}" for axis in sent), *(f"s {part}" for part in parts),
             "s together", "longest"]]
    for i, p in enumerate(plans):
        rows.append([_name(p), *(f"{counts[i] / unit:,.2f}" for counts in sent.values()),
                     *(f"{getattr(p.seconds, part):.3g}" for part in parts), f"{p.seconds.step:.3g}",
                     p.seconds.longest])
    return aligned(rows)


def generation_table(it):
    """What a rank holds and reads while a model writes, as lines."""
    job, unit = it.job, _unit(min(it.device.memory, it.memory))
    size = UNITS[unit]
    alone = "" if job.tp == 1 else f" on each of tp={job.tp} ranks"
    states = f", and {it.states:,} of its states" * (it.states > 0)
    return [f"written: {it.sequences:,} sequence{'s' * (it.sequences > 1)} of {it.tokens:,} tokens, of each of which "
            f"{it.per_token:,} bytes are kept{states}{alone}",
            *aligned([[f"{size} held", "parameters", "cache", "together", f"of {it.device.memory / unit:,.0f}",
                       "most sequences", "or tokens", f"{size} read", "ms per token", "tokens/s"],
                      ["written", *(f"{x / unit:,.2f}" for x in (it.parameters, it.cache, it.memory)), _fits(it),
                       f"{it.most_sequences:,}", f"{it.most_tokens:,}", f"{it.read / unit:,.2f}",
                       f"{it.seconds * 1e3:.3g}", f"{it.tokens_per_second:,.0f}"]])]


def _name(p):
    return "0, DDP" if p.job.stage == 0 else f"ZeRO {p.job.stage}"


def _held_unit(plans):
    """Not larger than the device's memory wants."""
    return _unit(min(plans[0].device.memory, max(p.fullest.memory for p in plans)))


def _unit(most):
    return next((unit for unit in UNITS if most >= unit), 1e3)
