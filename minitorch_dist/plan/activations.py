"""What a rank keeps of a forward pass for backward: the tables of kept.py, times how many there are of each element, by
micro-batch, stage and schedule."""

from typing import NamedTuple

from ..nn.windows import STATES, blocks_of
from .adapters import flow
from .kept import (
    AHEAD,
    AHEAD_OF_ADAPTERS,
    ATTENTION,
    EMBEDDING,
    FEED_FORWARD,
    GATED,
    GATES,
    INPUT,
    LATENTS,
    NORMED,
    OUTPUT,
    PROJECTION,
    QKV,
    TURNED,
    Row,
)
from .kept import OF_STATES as ROWS_OF_STATES
from .states import elements as of_states


def elements(job, samples, window=None, slice=0):
    """{per: how many there are on a rank}, of so many samples in a call, or of a slice of them; of a block with such a
    window.

    token, position  of this rank's part of the sequences
    whole            tokens times width, on every tensor-parallel rank; with sequence parallelism of its share, as rows
                     are of tokens
    input            the same, of what column-parallel matrices take: of a share only where backward gathers again
    answer, seen     the same, of what row-parallel matrices give, before it is added up; of what experts take
    again            the same, of several sequences that are gathered, of which A keeps a copy, row by row
    query, key, value, result, inner  features of all heads, and within the feed-forward; of its share
    turn             positions times those features of a head that rotary positions turn
    latent, latents, of latent …  of multi-head latent attention: what x is brought down to, latents alone, their rows;
                     what is made of them
    head, key head   (tokens, heads), (tokens, heads of keys), of its share
    projected        of attention by states: what x is projected to, of its share; see states.elements
    score            (heads, time, what there is to look at, or what a window leaves of it), of its share
    pair             (time, what there is to look at), of whole sequences
    pair with a block, block  (tokens, heads, blocks that are chosen), (heads of keys, all blocks), of its share
    logit            of its share of the vocabulary
    head weight      of the output layer's matrix, of its share
    group, together, expert  groups of tokens that are routed together, of one, of all experts in each
    choice, chosen, route, place …   of tokens with the experts they choose, times width; with all experts; of the
                     experts' rows, their inputs and inner features
    nobody, answers width  the row that is nobody's, where there is a capacity; of the experts' answers, with that one
    sorted           rows that come from several ranks and are put in their experts' order
    shared inner, shared answer  of all tokens within the shared experts; of what these give
    """
    model, (length, end) = job.model, job.parts[slice]
    time = length // job.cp
    tokens, tp = samples * time, job.tp
    between, inputs = (tp if it else 1 for it in (job.sequence_parallel, job.sequence_parallel == "regather"))
    found = {"call": 1, "position": time, "token": tokens, "row": tokens / between,
             "whole": tokens * model.width / between, "input": tokens * model.width / inputs,
             "answer": tokens * model.width, "seen": tokens * model.width,
             "again": tokens * model.width * (samples > 1 and job.sequence_parallel is True),
             **{name: tokens * count / tp for name, count in model.features.items()},
             "inner": tokens * model.inner / tp,
             "head": tokens * model.heads / tp, "key head": tokens * (model.kv_heads or model.heads) / tp,
             "turn": time * model.width // model.heads,
             "logit": tokens * -(-model.vocabulary // tp), "head weight": -(-model.vocabulary // tp) * model.width}
    if window in STATES:
        found |= of_states(job, samples, window)
    else:       # by heads/cp if Ulysses, of the whole time
        found |= {"pair": length * end,
                  "score": samples * model.heads / tp * time * model.scores(length, window, end)[1]}
        if count := model.chosen(end, window):
            blocks = -(-end // blocks_of(window)[1])
            found |= {"pair with a block": tokens * model.heads / tp * count,
                      "block": samples * (model.kv_heads or model.heads) / tp / job.cp * blocks}
    if (sizes := model.latent) is not None:
        q_rank = sizes.q_rank or 0
        # Queries of x: what `down` has kept as well, if it has, and not of the gathered whole.
        kept = job.sequence_parallel is not True and (not job.adapters or "attention.down" in job.adapters.layers)
        found |= {"turn": time * sizes.rope_size, "latent": tokens * sizes.down / between,
                  "latents": tokens * (q_rank + sizes.kv_rank) / between,
                  "latent row": tokens * (1 + (q_rank > 0)) / between, "of kv latent": tokens * sizes.kv_rank / inputs,
                  "of q latent": tokens * (q_rank or model.width * (not kept)) / inputs,
                  "up": tokens * model.heads * (sizes.nope_size + sizes.value_size) / tp}
    if model.experts:
        if "tp" in job.experts_over:        # of the rank's own positions, as `row`
            tokens /= tp
            found |= {"seen": tokens * model.width}
        rows, chosen = model.rows(tokens, time), tokens * model.top_k
        groups, capacity = 1 if model.group is None else samples, model.capacity_factor is not None
        found |= {"group": groups, "together": tokens / groups, "expert": groups * model.experts,
                  "route": tokens * model.experts, "choice": chosen,
                  "chosen": chosen * model.width, "place": rows, "place width": rows * model.width,
                  "nobody": capacity, "sorted": rows * (job.expert_ranks > 1 and not capacity),
                  "answers width": (rows + (job.ep == 1 and capacity)) * model.width, "place inner": rows * model.inner,
                  "shared inner": tokens * model.inner * model.shared_experts,
                  "shared answer": tokens * model.width * (model.shared_experts > 0)}
    return found


def block_of(job, window, slice=0):
    """The rows of one block with such a window, in the order of the ops."""
    model, precision = job.model, job.precision
    experts = "an expert each" if model.top_k == 1 and precision == "float32" else "experts"
    kind = ["gated"] * (model.gates > 1) + [experts] * bool(model.experts)
    ring = ", ring" if job.cp > 1 and job.cp_by == "ring" else ""
    latents = model.latent is not None
    turned = [] if model.family == "gpt" else TURNED[precision + ", latents" * latents]
    chain = ", dropped" * model.attention_dropout + ", sinks" * model.sinks if precision == "float32" else ""
    attention = ATTENTION[precision + (chain or ring or ", blocks" * bool(model.chosen(job.parts[slice].end, window)))]
    if model.heads == job.tp and not model.gated and (
            job.adapters is None or "attention.out" in job.adapters.layers or fused("attention.out", job)):
        # Of one head a ring's result is the projection's input as it stands: one array.
        attention = [row for row in attention if row.per != "result"]
    normed = NORMED[precision + ring * (not turned)] if model.qk_norm else []
    if normed and precision == "float32" and (ring or job.cp == 1):     # the values are those beside queries and keys
        attention = [row for row in attention if row.what != "values"]
    if job.slices > 1 and (precision == "mixed" or turned or normed or latents):    # else they lie beside queries
        attention = [row for row in attention if row.what not in ("keys", "values")]
    if window in STATES:
        first = ROWS_OF_STATES[window][precision + ", normed" * model.qk_norm]
    else:
        gates = _gates(job, ring, bool(normed), bool(turned)) if model.gated else []
        gated = GATED.get(precision + ring, GATED[precision]) if model.gated else []
        first = [*(LATENTS if latents else QKV)[precision], *gates, *normed, *turned, *attention, *gated]
    rows = [*first, *PROJECTION[precision],
            *FEED_FORWARD[", ".join([precision, " ".join(kind)]) if kind else precision]]
    return rows if job.tp == 1 else divided(rows, job)


def _gates(job, ring, normed, turned):
    """The rows of gates beside those of queries, keys and values."""
    rows = [GATES[job.precision]]
    if job.precision == "float32" and (normed or not turned and (ring or job.cp == 1)):
        rows.append(GATES["normed" if normed else "viewed"])
    return rows


def divided(rows, job):
    """A block's rows as tensor parallelism has them, where that is another thing for W."""
    found, biased = [], job.sequence_parallel and job.model.family == "gpt"
    for row in rows:
        if row.what == "GELU: its argument and share":      # the matrix before it is an op of its own
            row = row._replace(late=0)
        found.append(row)
        if biased and row.per == "answer":      # the bias is added to a share of the answer
            found.append(Row("its bias: cotangent", "whole", 0, row.late))
    return found


def with_adapters(rows, job, flows=True, window=None):
    """Of these rows, in the order of the ops, those that are kept where adapters alone are trained; and theirs.

    flows   whether a gradient flows to the first op's input: nothing is kept of what is before the first adapter
    A frozen matrix needs no input of its own: only where an adapter does, it is kept, or where this library's tape
    keeps it for all that (`fused`). W has adapters alone to come to.
    """
    if job.adapters is None:
        return rows
    layers, size, found = job.adapters.layers, job.sizes["parameter"], []
    comes = flow(job.adapters, job.model.takes(window), not flows)
    tape = job.precision == "float32"       # this library's
    for row in rows:
        mine = [name for name in row.of.split() if name in layers]
        before, flows = flows, flows or bool(mine)
        if not flows or row.behind and not comes[row.behind][1]:
            continue
        if not mine and row.what != "labels":       # which are the program's own
            row = row._replace(late=0, nbytes=row.nbytes if not row.of or tape and fused(row.of, job) else 0)
        found.append(row)
        if mine and row.nbytes:
            each = size * job.adapters.rank
            per = "row" if row.per == "whole" else "token"      # of this rank's, where its input is
            found += [Row(f"adapter of {name}: what A makes, its cotangent", per, each, 2 * each) for name in mine]
            if tape and row.per == "input" and before and fused(row.of, job):
                found.append(Row("its input, in rows", "again", 4))
    return found


def fused(layer, job):
    """Whether a frozen matrix's input is kept all the same: by one op for x Wᵀ + b, or for x Wᵀ and the loss behind it,
    which may be differentiated again.
    Where the ranks' parts of the result are added up, b comes later; a llama has none."""
    if layer == "head":
        return job.tiled_loss
    biased = ("attention.qkv", "attention.project", "mlp.0", *["attention.out", "mlp.2"] * (job.tp == 1))
    return job.model.family == "gpt" and layer in biased


class Kept(NamedTuple):
    """Bytes that a rank keeps of a micro-batch in a stage.

    until_backward  from F to B or I
    in_backward     more than these, for a while, in B
    in_input        the same, in I
    late            from I to W
    left            of a micro-batch's slices, from the first one's F on, what they leave for later ones
    grown           in B, what is left for earlier ones: of the last slice more, of the first one's all goes
    in_forward      for a while, in F
    """

    until_backward: float
    in_backward: float
    in_input: float
    late: float
    left: float = 0
    grown: float = 0
    in_forward: float = 0


def activations(job, stage, samples, slice=0):
    """Kept, of so many samples, or a slice of them, in a stage (blocks that the rank has, whether it has the embedding,
    whether the output layer). With checkpointing only a block's input is kept, and backward has one block at a time
    whole."""
    numbers, first, last = stage
    counts = {window: elements(job, samples, window, slice) for window in {None, *map(job.model.window_of, numbers)}}
    count, ends = counts[None], _ends(job)
    size = job.sizes["parameter"]       # (the loss came in one array with x, which the first norm's weight keeps for W)
    before = EMBEDDING[ends] if first else [Row("auxiliary loss", "row", size, size)] * bool(job.model.experts)
    parted = job.cp > 1 or job.slices > 1
    if first and parted and job.precision == "float32" and job.model.family == "gpt":
        before = [*before, Row("positions", "position", 8)]
    of_depths = [depth(job, k, samples) for k in range(1, 1 + job.depth)]
    before = with_adapters(before, job, not first)     # a later stage hands its input's gradient on
    output = _output(job) if last else []
    behind, rows = with_adapters(output, job), {window: block_of(job, window, slice) for window in counts}
    block, begin = ({window: with_adapters(each, job, flows, window) for window, each in rows.items()}
                    for flows in (True, False))
    if job.cp > 1 and not job.tiled_loss:       # its labels aren't a view of the batch's, but a copy, which I drops
        behind = [row._replace(late=0) if row.what == "labels" else row for row in behind]

    before, behind = in_bytes(before, count, job), in_bytes(behind, count, job)
    of_block, of_begin = ({window: in_bytes(rows[window], each, job) for window, each in counts.items()}
                          for rows in (block, begin))
    blocks = [(of_begin if first and i == numbers[0] else of_block)[job.model.window_of(i)] for i in numbers]
    n, (left, gradients) = len(blocks), left_of(job, samples)
    begins, turns = slice == 0, slice == job.slices - 1     # forward's first slice; backward's
    grown = n * (gradients * turns - (left + gradients) * begins)
    left, gradients = n * left * begins, gradients * turns
    if job.checkpointing:
        inputs = count["whole"] * INPUT[job.precision]
        own_labels = any(row.what == "labels" for row in output)
        labels = 8 * count["token"] * own_labels * (job.slices == 1)        # the program's: they stay
        alone = first and job.adapters is not None      # what nothing is trained before keeps no input
        own, most, ran = together(before), 0, 0
        for i, rows in enumerate(blocks):       # each runs again when those behind it are through
            own += inputs
            others = own - inputs * (i > 0 or not alone)        # its own input is among what it keeps
            ran = max(ran, others + together(rows) + left / n * (i + 1))
            most = max(most, others + rising(rows, gradients) + labels + gradients * (n - 1 - i))
        own += together(behind)
        for ahead, inputs, again, behind in of_depths:      # a depth is through before the one before it begins
            most = max(most, own + ahead + again)
            own += ahead + inputs + behind
        return Kept(own, max(0, most - own), 0, 0, left, grown, ran)
    kept = sum(map(together, [before, *blocks, behind])) + sum(it.ahead + it.block + it.behind for it in of_depths)
    if job.slices > 1:
        now, most = together(before), kept
        for i, rows in enumerate(blocks):
            most = max(most, now + rising(rows, gradients) + gradients * (n - 1 - i))
            now += together(rows)
        return Kept(kept, most - kept, 0, 0, left, grown)
    if first:       # nobody waits for its input's gradient: all is left to W
        return Kept(kept, 0, 0, kept)
    now = most = 0
    rows = [row for part in (before, *blocks, behind) for row in part][::-1]
    for row in sorted(rows, key=lambda row: not row.what.startswith("balance")):     # the auxiliary loss goes first
        now += row.late - row.nbytes
        most = max(most, now)
    return Kept(kept, 0, most, kept + now)


def left_of(job, samples):
    """Bytes of the keys and values that a micro-batch's slices leave in a block, and of their gradients."""
    features = job.model.features["key"] + job.model.features["value"]
    elements = samples * job.time * features / job.tp * (job.slices > 1)
    return elements * job.sizes["parameter"], elements * 4


def rising(rows, gradients):
    """The most bytes in the backward of a block with these rows, which from its attention on keeps gradients for
    earlier slices."""
    before = next((i for i, row in enumerate(rows) if row.what == "queries"), 0)
    return max(together(rows), together(rows[:before]) + gradients)


def _ends(job):
    """By which the embedding's rows are found."""
    return "float32, divided" if job.precision == "float32" and job.tp > 1 else job.precision


def _output(job):
    """The rows behind the last block."""
    rows = OUTPUT[f"{job.precision}, by tiles" if job.tiled_loss else _ends(job)]
    if job.tiled_loss and job.sequence_parallel == "regather" and job.precision == "float32":
        # What is gathered again is so once: I makes the gradient of the output layer as well.
        rows = [row._replace(late=0) if row.of == "head" else row for row in rows]
        return [*rows, Row("output layer: its gradient", "head weight", 0, 4, "head")]
    return rows


class Depth(NamedTuple):
    """Bytes that a further depth keeps: before its block, of the block's input, of the block, behind it."""

    ahead: float
    inputs: float
    block: float
    behind: float


def depth(job, k, samples):
    """Depth k's Depth, of so many samples."""
    alone = job.ahead(k)
    window = alone.model.window_of(0)
    count = elements(alone, samples, window)
    whose = [Row("tokens, and whose row they are", "token", 9)] * (_ends(job) == "float32, divided")
    # Of a single sequence the later labels lie one after another in those of the program.
    output = [row for row in _output(job) if samples > 1 or row.what != "labels"]
    before = [*AHEAD[job.precision], *whose] if job.adapters is None else AHEAD_OF_ADAPTERS[job.precision]
    ahead, block, behind = (together(in_bytes(rows, count, job)) for rows in (
        before, with_adapters(block_of(alone, window), alone, window=window), with_adapters(output, alone)))
    return Depth(ahead, count["whole"] * INPUT[job.precision], block, behind)


def in_bytes(rows, count, job):
    """Those of the rows that are there, with the bytes of all their elements; count: {per: how many there are}."""
    return [row._replace(nbytes=row.nbytes * count[row.per], late=row.late * count[row.per]) for row in rows
            if not row.what.startswith("dropout") or job.model.dropout
            or job.model.attention_dropout and row.per == "score"]


def together(rows):
    """Bytes of rows in_bytes."""
    return sum(row.nbytes for row in rows)
