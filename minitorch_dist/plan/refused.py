"""What of a Job can't be: each in one line, with what to do instead."""

from math import inf, lcm

from ..nn.windows import STATES, as_text, blocks_of, windows_of
from ..parallel.experts.moe import dispatched_in
from ..parallel.pipelines.schedules import SCHEDULES, SLICED, V_SHAPED, WEIGHT
from ..parallel.tensor.sequence_parallel import check_choice
from .adapters import BASE_BITS
from .optimizers import OPTIMIZERS, takes_pieces

UNCUT = tuple(name for name in SLICED if not name.startswith("zb"))
EXPERTS_OVER = {"cp": "--cp", "tp": "--tp and --sequence-parallel"}     # axis -> what its ranks share sequences by


def check(job):
    """ValueError where a Job's parts don't go together, whose numbers are right one by one."""
    _check_optimizer(job)
    _check_messages(job)
    _check_lora(job)
    _check_cut(job)
    _check_loss(job)
    if job.model.layers is not None:
        _check_ahead(job)
        _check_sequences(job)
        _check_experts(job)
    _check_schedule(job)


def _check_optimizer(job):
    """ValueError where the optimizer is unknown, or can't do what else is asked for, or plan has no table of that."""
    name, what = job.optimizer, f"--optimizer {job.optimizer}"
    if name not in OPTIMIZERS:
        raise ValueError(f"{what}: take one of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    if job.fraction is not None:
        having = [other for other, it in OPTIMIZERS.items() if it.matrices is not None and it.matrices.fraction]
        if name not in having:
            raise ValueError(f"--fraction {job.fraction:g} with {what}, whose steps are made of all there is: leave it "
                             f"out, or take --optimizer {' or '.join(having)}")
        if not 0 < job.fraction <= 1:
            raise ValueError(f"--fraction {job.fraction:g}: must be more than 0, at most 1")
    if job.state_bits != 32 and not kind.eight_bits:
        few = [other for other, it in OPTIMIZERS.items() if it.eight_bits]
        raise ValueError(f"--state-bits {job.state_bits} with {what}, which has none of so few bits: leave it out, or "
                         f"take --optimizer {', '.join(few)}")
    if kind.matrices is None and not kind.norms:
        return
    simple = ", ".join(other for other, it in OPTIMIZERS.items() if it.matrices is None and not it.norms)
    apart = f"whose steps aren't made element by element: leave it out, or take --optimizer {simple}"
    if job.model.layers is None:
        raise ValueError(f"{what} of a model of which only the number of parameters is known, and not its matrices: "
                         "give --layers, --width and --heads instead of --parameters")
    if job.frozen:
        raise ValueError(f"--lora-rank {job.lora_rank} with {what}, {apart}")
    if job.offload_optimizer:
        raise ValueError(f"--offload-optimizer with {what}, {apart}")
    if kind.norms and job.expert_ranks > 1:
        raise ValueError(f"{job.sizes_of(job.expert_axes)} ranks that divide experts with {what}: plan has no table of "
                         f"what norms of their stacks send: take --optimizer {simple}")
    if not takes_pieces(name) and (job.stage or job.tp > 1):
        raise ValueError(f"{what} with stage={job.stage}, tp={job.tp}: its steps are of whole matrices, not of pieces "
                         "or parts: take --stage 0 and --tp 1, or --optimizer muon or dion2")


def _check_messages(job):
    """ValueError where neighbours can't keep values, or what travels can't have so few bits, as in fully_shard."""
    near, given = job.reshard_after_forward, f"--reshard-after-forward {job.reshard_after_forward}"
    if near is not None and (near < 2 or job.shards % near):
        raise ValueError(f"{given}: it must be a divisor above 1 of the {job.shards} ranks that share a copy")
    if near is not None and (job.stage != 3 or job.pp > 1 or job.unlike > 1):
        axes = job.unlike_axes
        raise ValueError(f"{given} with stage={job.stage}, pp={job.pp}, {job.sizes_of(axes)}: values are cut in stage "
                         f"3 only, a pipeline keeps them, and neighbours along {' and '.join(axes)} have other "
                         "experts: take --stage 3, without these")
    for name, bits, least in (("param", job.param_bits, 3), ("reduce", job.reduce_bits, 1)):
        if bits not in (None, 4, 8):
            raise ValueError(f"--{name}-bits {bits}: take 8 or 4")
        if bits and job.stage < least:
            raise ValueError(f"--{name}-bits {bits} with stage {job.stage}: the least stage with such messages is "
                             f"{least}: take --stage 3")
    if job.dispatch_bits is not None:
        if job.dispatch_bits not in (4, 8):
            raise ValueError(f"--dispatch-bits {job.dispatch_bits}: take 8 or 4")
        if job.expert_ranks == 1 or job.model.layers is None:
            raise ValueError(f"--dispatch-bits {job.dispatch_bits} without divided experts, to which rows could go: "
                             "give a GPT's sizes, --experts and --ep")
        dispatched_in(job.model.width, job.dispatch_bits)
    model = job.model
    for axis in job.experts_over:
        if axis not in EXPERTS_OVER:
            raise ValueError(f"--experts-over {axis}: take {' or '.join(EXPERTS_OVER)}")
        if getattr(job, axis) == 1 or axis == "tp" and not job.sequence_parallel:
            raise ValueError(f"--experts-over {axis} without ranks that share sequences: give {EXPERTS_OVER[axis]}")
        if model.layers is None or not model.experts or model.capacity_factor is not None:
            raise ValueError(f"--experts-over {axis} without experts that take all that choose them: give a GPT's "
                             "sizes, --experts and --no-capacity")
    if job.dispatch_once and (job.expert_ranks == 1 or model.layers is None or model.capacity_factor is not None):
        raise ValueError("--dispatch-once without divided experts that take all that choose them: give a GPT's sizes, "
                         "--experts, --no-capacity and --ep")


def _check_lora(job):
    if not job.frozen:
        if lost := [name for name in ("base_bits", "lora_targets") if getattr(job, name) is not None]:
            raise ValueError(f"--{lost[0].replace('_', '-')} without adapters, which all else is frozen for: give "
                             "--lora-rank")
        return
    if job.base_bits not in (None, *(allowed := BASE_BITS[job.precision])):
        raise ValueError(f"--base-bits {job.base_bits} with --precision {job.precision}: frozen weights have "
                         f"{' or '.join(map(str, allowed))} bits there")
    if job.model.layers is None:
        if job.lora_rank is not None or job.lora_parameters is None:
            raise ValueError(f"--lora-rank {job.lora_rank} of a model of which only the number of parameters is "
                             "known: an adapter's size is that of its matrix. Give --lora-parameters, how many all "
                             "have together, or --layers, --width and --heads instead of --parameters")
        if job.lora_targets is not None:
            raise ValueError(f"--lora-targets {' '.join(job.lora_targets)} of a model of which only the number of "
                             "parameters is known: --lora-parameters says all there is. Leave it out")
        if not 0 < job.lora_parameters < inf:
            raise ValueError(f"--lora-parameters {job.lora_parameters}: must be a positive number")
        return
    if job.lora_parameters is not None:
        raise ValueError(f"--lora-parameters {job.lora_parameters:g} of a GPT, whose adapters are counted: give "
                         "--lora-rank")
    if job.lora_rank < 1:
        raise ValueError(f"--lora-rank {job.lora_rank}: it must be at least 1")
    if job.base_bits == 4 and job.tp > 1:
        raise ValueError(f"--base-bits 4 with tp={job.tp}: parts of a matrix would cut the blocks of 64 elements "
                         "that share a scale: take --tp 1 or leave --base-bits out")
    if job.stage == 3 and 1 in (job.model.layers, job.depth) and not job.model.experts:
        what, more = ("layer", "--layers") if job.model.layers == 1 else ("further depth", "--predict")
        raise ValueError(f"stage 3 of a single {what} with adapters: its feed-forward's two matrices are units "
                         "within the one around them, and which of these backward gathers again hangs on where "
                         f"adapters are, and on their bits; plan has no table of that: take --stage 2, or {more} "
                         f"{2 if job.model.layers == 1 else 3}")
    _ = job.adapters       # looks its targets up, or raises


def _check_cut(job):
    model = job.model
    check_choice("--sequence-parallel", job.sequence_parallel)
    if model.layers is None:
        if job.tp * job.pp * job.cp * job.ep > 1 or job.sequence_parallel:
            raise ValueError(f"{job.mesh()} of a model of which only the number of parameters is known: give "
                             "--layers, --width and --heads instead of --parameters")
        return
    if model.heads % job.tp or (model.kv_heads or job.tp) % job.tp:
        raise ValueError(f"tp={job.tp} must divide the {model.heads} heads"
                         f"{f' and {model.kv_heads} kv_heads' * (model.kv_heads is not None)}: take another --tp")
    if model.inner % job.tp:
        raise ValueError(f"tp={job.tp} must divide the {model.inner} features within the feed-forward: take "
                         "another --tp or --hidden")
    if model.vocabulary < job.tp:
        raise ValueError(f"tp={job.tp} ranks can't share a vocabulary of {model.vocabulary}: lower --tp")
    if model.layers < job.pp * job.stages_per_rank:
        how = ("pp·2", f"--pp ({job.schedule} has two stages per rank)") if job.schedule in V_SHAPED else \
            ("pp·chunks", "--pp or --chunks")
        raise ValueError(f"{model.layers} layers can't be cut into {how[0]} = {job.pp * job.stages_per_rank} "
                         f"stages: lower {how[1]}")
    if job.time > model.context:
        raise ValueError(f"sequences of {job.time} tokens for a context of {model.context}: raise --context")
    if job.sequence_parallel and job.tp == 1:
        raise ValueError("sequence parallelism is for --tp 2 or more, and tp=1: raise it, or leave "
                         "--sequence-parallel out")


def _check_loss(job):
    """A GPT's forward, given targets, makes its losses from the output layer's input; see nn.GPT.losses."""
    if not job.tiled_loss:
        return
    if job.model.layers is None:
        raise ValueError("--tiled-loss of a model of which only the number of parameters is known: give a GPT's "
                         "sizes, or leave it out")
    if job.adapters is not None and "head" in job.adapters.layers:
        raise ValueError("--tiled-loss with an adapter beside the output layer, whose logits are the sum of two "
                         "products: leave one of them out")


def _check_ahead(job):
    if not job.depth:
        return
    what = f"--predict {job.model.predict}"
    if job.time <= job.depth:
        raise ValueError(f"{what}: {job.time} tokens for depth={job.depth}: give {job.depth + 1} or more by "
                         "--sequence-length")
    if job.sequence_parallel:
        raise ValueError(f"{what}: sequence_parallel divides the sequences, and the model puts positions together "
                         "with later tokens, which other ranks have: leave it out")
    if job.cp > 1:
        raise ValueError(f"{what} with cp={job.cp}: the model looks at several positions, of which each rank has "
                         "some: take --cp 1")
    if job.pp > 1:
        raise ValueError(f"{what} with pp={job.pp}: all depths use the embedding and the output layer, which are "
                         "the first stage's and the last one's: take --pp 1")
    if job.stage == 3 and job.model.layers == 1:
        raise ValueError(f"{what} with stage 3 of a single layer: its units lie in the one around them, which "
                         "further depths use in between; plan has no table of what is gathered again then: take "
                         "--stage 2, or more --layers")


def _check_sequences(job):
    cut, parts = 2 * job.cp if job.cp > 1 else 1, job.cp * job.tp if job.sequence_parallel else 1
    if job.time % cut or job.time % parts:
        by = lcm(cut, parts)
        fits = [n for n in (-(-job.time // by) * by, job.time // by * by) if 0 < n <= job.model.context]
        what = f"tp={job.tp} must divide the {job.time // job.cp} tokens of a sequence that a rank has"
        if job.time % cut:
            what = (f"cp={job.cp} ranks take two equal pieces of a sequence each, and 2·cp doesn't divide "
                    f"{job.time} tokens")
        raise ValueError(f"{what}: " + (f"--sequence-length {fits[0]}" if fits else
                                        f"lower --{'cp' if job.cp > 1 else 'tp'}"))
    if job.cp == 1:
        return
    if job.model.attention_dropout and job.cp_by == "ring":
        raise ValueError(f"cp={job.cp} ranks in a ring drop no weights: take --cp-by all_to_all, or leave "
                         "--attention-dropout out")
    if job.model.sinks and job.cp_by == "ring":
        raise ValueError(f"cp={job.cp} ranks in a ring have no sinks: take --cp-by all_to_all, or leave --sinks "
                         "out")
    if any(map(blocks_of, windows_of(job.model.window))) and job.cp_by == "ring":
        raise ValueError(f"cp={job.cp} ranks in a ring don't have all blocks to choose from: take --cp-by all_to_all, "
                         f"or another --window than {as_text(windows_of(job.model.window))}")
    if job.cp_by == "all_to_all" and (job.model.kv_heads or job.model.heads) // job.tp % job.cp:
        raise ValueError(f"cp={job.cp} ranks must divide the heads that tp={job.tp} leaves, of keys too: lower "
                         "--cp, or take --cp-by ring")


def _check_experts(job):
    if job.expert_ranks > 1 and (not job.model.experts or job.model.experts % job.expert_ranks):
        hint = "take a divisor of --experts" if job.model.experts else "give --experts, a multiple of that"
        raise ValueError(f"{job.sizes_of(job.expert_axes)} ranks can't share {job.model.experts} experts equally: "
                         f"{hint}")
    if job.shards % job.unlike and job.unlike % job.shards:
        raise ValueError(f"--shard-over {job.shard_over} with {job.sizes_of(job.unlike_axes)}: a copy's ranks "
                         "must have all experts, or share some: take a multiple or a divisor of "
                         f"{' · '.join(f'--{axis}' for axis in job.unlike_axes)}")
    if job.model.experts and job.cp > 1 and job.model.capacity_factor is not None:
        raise ValueError(f"cp={job.cp} of a mixture of experts with a capacity, for which tokens of all ranks "
                         "compete: take --tp with --sequence-parallel, or experts without a capacity")


def _check_slices(job):
    """ValueError where a pipeline's sequences can't come in slices, or plan has no table of that."""
    if job.slices == 1:
        return
    model, given = job.model, f"--slices {job.slices}"
    if job.pp == 1 or job.schedule not in UNCUT:
        raise ValueError(f"{given} with --pp {job.pp} --schedule {job.schedule}: plan has tables of slices in "
                         f"pipelines whose backward is uncut: take --pp 2 or more, and --schedule {' or '.join(UNCUT)}")
    if job.time < job.slices:
        raise ValueError(f"{given} of {job.time} positions: each must have one at least")
    if job.sequence_parallel and job.time % (job.slices * job.tp):
        raise ValueError(f"{given} of {job.time} positions, which tp={job.tp} ranks divide once more: "
                         f"--sequence-length must be a multiple of {job.slices * job.tp}")
    for beside, there in (("--cp", job.cp > 1), ("--experts, whose loss is of all positions", model.experts),
                          ("--attention-dropout", model.attention_dropout), ("--predict", job.depth),
                          ("--lora-rank", job.frozen),
                          (f"--window {as_text(windows_of(model.window))}",
                           {*STATES} & {model.window_of(i) for i in range(model.layers)})):
        if there:
            raise ValueError(f"{given} with {beside}: they don't go together, or plan has no table of both: leave one "
                             "of them out")


def _check_schedule(job):
    if job.schedule not in SCHEDULES:
        raise ValueError(f"schedule {job.schedule!r}: take one of {', '.join(SCHEDULES)}")
    if job.chunks > 1 and (job.schedule != "interleaved" or job.pp == 1):
        raise ValueError(f"{job.chunks} chunks per rank are for --schedule interleaved and --pp 2 or more")
    if job.schedule != "1f1b" and job.pp == 1:
        raise ValueError(f"--schedule {job.schedule} is for --pp 2 or more")
    if job.schedule == "interleaved" and job.calls % job.pp:
        raise ValueError(f"interleaved: pp={job.pp} must divide the {job.micro_batches} micro-batches: take "
                         f"--micro-batches {-(-job.micro_batches // job.pp) * job.pp}")
    _check_slices(job)
    in_two = any(step.kind == WEIGHT for step in job.steps[0])
    if in_two and job.checkpointing:
        raise ValueError(f"schedule {job.schedule} with --checkpointing: a block that is computed again makes all "
                         "its gradients at once, and leaves nothing to W: take --schedule 1f1b")
