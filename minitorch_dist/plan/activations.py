"""What is kept of a forward pass for backward, as tables: rows of an op, how many bytes for each element of what.

"mixed" is Megatron-LM in 16 bits, from the paper: 34·s·b·h + 5·a·s²·b bytes per block; on t tensor-parallel ranks
10·s·b·h + (24·s·b·h + 5·a·s²·b)/t, and with sequence parallelism ("regather") all of it divided by t. "float32" is this
library's own tape, on the CPU: what the ledger counts as "activation", to the byte.

Where backward is cut in two (parallel/schedules.py), I frees what W doesn't need, and keeps the cotangents of matrices
for it: 32·s·b·h bytes per block in 16 bits.

Sources: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models"; Qi et al. 2023, "Zero
bubble pipeline parallelism" (what W needs).
"""

from typing import NamedTuple

from .adapters import flow


class Row(NamedTuple):
    """nbytes are kept by an op for each element of `per` (see `elements`); `late` of them while only W is to come.
    of: the matrices whose gradients alone it is kept for. behind: the product whose output's gradient it is kept for,
    where that isn't the one before."""

    what: str
    per: str
    nbytes: int
    late: int = 0
    of: str = ""
    behind: str = ""


def elements(job, samples, window=None):
    """{per: how many there are on a rank}, of so many samples in a call; of a block with such a window.

    token, position  of this rank's part of the sequences
    whole            tokens times width, on every tensor-parallel rank; with sequence parallelism of its share, as rows
                     are of tokens
    input            the same, of what column-parallel matrices take: of a share only where backward gathers again
    answer, seen     the same, of what row-parallel matrices give, before it is added up; of what experts take
    again            the same, of several sequences that are gathered, of which A keeps a copy, row by row
    query, key, value, result, inner  features of all heads, and within the feed-forward; of its share
    turn             positions times those features of a head that rotary positions turn
    latent, latents, of latent …  of attention by latents: what x is brought down to, latents alone, their rows; what
                     is made of them
    head, key head   (tokens, heads), (tokens, heads of keys), of its share
    score            (heads, time, time, or what a window leaves of it), of its share
    logit            of its share of the vocabulary
    head weight      of the output layer's matrix, of its share
    group, together, expert  groups of tokens that are routed together, of one, of all experts in each
    choice, chosen, route, place …   of tokens with the experts they choose, times width; with all experts; of the
                     experts' rows, their inputs and inner features
    nobody, answers width  the row that is nobody's, where there is a capacity; of the experts' answers, with that one
    sorted           rows that come from several ranks and are put in their experts' order
    shared inner, shared answer  of all tokens within the shared experts; of what these give
    """
    model, time = job.model, job.time // job.cp
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
             # By heads/cp if Ulysses, of the whole time:
             "score": samples * model.heads / tp * time * model.scores(job.time, window)[1],
             "logit": tokens * -(-model.vocabulary // tp), "head weight": -(-model.vocabulary // tp) * model.width}
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
        rows, chosen = model.rows(tokens, time), tokens * model.top_k
        groups, capacity = 1 if model.group is None else samples, model.capacity_factor is not None
        found |= {"group": groups, "together": tokens / groups, "expert": groups * model.experts,
                  "route": tokens * model.experts, "choice": chosen,
                  "chosen": chosen * model.width, "place": rows, "place width": rows * model.width,
                  "nobody": capacity, "sorted": rows * (job.ep > 1 and not capacity),
                  "answers width": (rows + (job.ep == 1 and capacity)) * model.width, "place inner": rows * model.inner,
                  "shared inner": tokens * model.inner * model.shared_experts,
                  "shared answer": tokens * model.width * (model.shared_experts > 0)}
    return found


def norm(what):
    return [Row(f"{what}: its input, normalised", "whole", 8, 8), Row("1/std", "row", 4, 4),
            Row("its cotangent", "whole", 0, 4)]


DROPPED = {"mixed": Row("dropout: mask", "whole", 1), "float32": Row("dropout: mask", "whole", 4)}


def router(size):
    return [Row("router: its input", "seen", size, size, of="mlp.router mlp.shared"),
            Row("its cotangent", "route", 0, size, of="mlp.router")]


def experts(between, size, kept, first):
    """`kept` bytes between their matrices; `first`: of the cotangent of what the first ones give."""
    return [Row("experts: their input", "place width", size, size, of="mlp.experts"),
            Row("cotangent of the first matrices", "place inner", 0, first, of="mlp.experts"),
            Row(between, "place inner", kept),
            Row("second matrices: their input", "place inner", size, size, of="mlp.experts"),
            Row("their cotangent", "answers width", 0, size, of="mlp.experts")]


def routed(between, first, scores, gates):
    """A mixture of experts in float32, of one of two kinds, whose gates are made in one of two ways (nn/moe.py:
    route), in the order in which backward comes to them, last to first."""
    seen, back = router(4)
    return [*norm("second norm"), seen, Row("whose row it is", "place", 8), Row("nobody's", "nobody", 8),
            Row("to their experts, and back", "sorted", 16), *experts(between, 4, 8, first),
            Row("where the answers are", "choice", 8), back, *scores,
            Row("the experts in order", "route", 8), Row("groups", "group", 8), Row("tokens", "together", 8),
            *gates, Row("answers", "chosen", 4), *shared(between, 4, 8, first), Row("balance: use", "expert", 4),
            DROPPED["float32"]]


def shared(between, size, kept, first):
    """Of shared experts, which take what the router takes; as `experts`."""
    return [Row("cotangent of shared experts' first matrices", "shared inner", 0, first, of="mlp.shared"),
            Row(f"shared experts: {between}", "shared inner", kept),
            Row("their second matrices: their input", "shared inner", size, size, of="mlp.shared"),
            Row("their cotangent", "shared answer", 0, size, of="mlp.shared")]


# Attention up to its projection, by how it is made. dropout's rows are there with dropout only.
QKV = {"mixed": [Row("first norm: its input", "whole", 2),
                 Row("queries, keys, values: their input", "input", 2, 2, "attention.qkv"),
                 Row("cotangent of queries", "query", 0, 2, "attention.qkv"),
                 Row("of keys and values", "key", 0, 4, "attention.qkv")],
       "float32": [*norm("first norm"), Row("queries, keys, values: their input", "input", 4, 4, "attention.qkv"),
                   Row("cotangent of queries", "query", 0, 4, "attention.qkv"),
                   Row("of keys and values", "key", 0, 8, "attention.qkv")]}
LATENTS = {
    kind: [*first, Row("latents: their input", "whole", size, size, "attention.down"),
           Row("latents and key", "latent", size, size * exact), Row("cotangent of both", "latent", 0, size,
                                                                     "attention.down"),
           *[Row("latents, normalised", "latents", size, size), Row("1/std", "latent row", 4, 4),
             Row("their cotangents", "latents", 0, size)] * exact,
           Row("queries: their input", "of q latent", size, size, "attention.q"),
           Row("cotangent of queries", "query", 0, size, "attention.q"),
           Row("keys and values: their input", "of kv latent", size, size, "attention.kv"),
           Row("cotangent of keys and values", "up", 0, size, "attention.kv")]
    for kind, size, exact, first in (("mixed", 2, False, [Row("first norm: its input", "whole", 2)]),
                                     ("float32", 4, True, norm("first norm")))}
ATTENTION = {
    "mixed": [Row("queries", "query", 2), Row("keys", "key", 2), Row("softmax", "score", 2),
              Row("dropout of it: mask and result", "score", 3), Row("values", "value", 2)],
    "mixed, ring": [Row("queries", "query", 2), Row("keys", "key", 2), Row("values", "value", 2),
                    Row("sums of exponentials", "head", 4)],
    "float32": [Row("queries", "query", 4), Row("keys", "key", 4), Row("values", "value", 4),
                Row("softmax", "score", 4)],
    "float32, ring": [Row("queries", "query", 4), Row("result", "result", 4), Row("keys", "key", 4),
                      Row("values", "value", 4), Row("sums of exponentials", "head", 4)],
}
PROJECTION = {kind: [Row("projection: its input", "result", size, size, "attention.out"),
                     Row("its cotangent", "answer", 0, size, "attention.out"), DROPPED[kind]]
              for kind, size in (("mixed", 2), ("float32", 4))}
FEED_FORWARD = {
    "mixed": [Row("second norm: its input", "whole", 2), Row("feed-forward: its input", "input", 2, 2, "mlp.0"),
              Row("GELU: its argument", "inner", 2), Row("cotangent of the first matrix", "inner", 0, 2, "mlp.0"),
              Row("second matrix: its input", "inner", 2, 2, "mlp.2"), Row("its cotangent", "answer", 0, 2, "mlp.2"),
              DROPPED["mixed"]],
    "mixed, gated": [
        Row("second norm: its input", "whole", 2), Row("feed-forward: its input", "input", 2, 2, "mlp.0"),
        Row("SwiGLU: gate and up", "inner", 4), Row("cotangent of the first matrix", "inner", 0, 4, "mlp.0"),
        Row("last matrix: its input", "inner", 2, 2, "mlp.2"), Row("its cotangent", "answer", 0, 2, "mlp.2"),
        DROPPED["mixed"]],
    "float32": [*norm("second norm"), Row("feed-forward: its input", "input", 4, 4, "mlp.0"),
                Row("cotangent of the first matrix", "inner", 0, 4, "mlp.0"),
                Row("GELU: its argument and share", "inner", 8, 8),
                Row("second matrix: its input", "inner", 4, 4, "mlp.2"), Row("its cotangent", "answer", 0, 4, "mlp.2"),
                DROPPED["float32"]],
    "float32, gated": [*norm("second norm"), Row("feed-forward: its input", "input", 4, 4, "mlp.0"),
                       Row("cotangent of the first matrix", "inner", 0, 8, "mlp.0"),
                       Row("SwiGLU: gate and up", "inner", 8),
                       Row("last matrix: its input", "inner", 4, 4, "mlp.2"),
                       Row("its cotangent", "answer", 0, 4, "mlp.2"), DROPPED["float32"]],
    "mixed, experts": [
        Row("second norm: its input", "whole", 2), *router(2), Row("softmax", "route", 4),
        *experts("GELU: its argument", 2, 2, 2),
        Row("answers, to be weighted", "chosen", 2), *shared("GELU: its argument", 2, 2, 2), DROPPED["mixed"]],
    "mixed, gated experts": [
        Row("second norm: its input", "whole", 2), *router(2), Row("softmax", "route", 4),
        *experts("SwiGLU: gate and up", 2, 4, 4),
        Row("answers, to be weighted", "chosen", 2), *shared("SwiGLU: gate and up", 2, 4, 4), DROPPED["mixed"]],
    **{f"float32, {kind}{gates}": routed(what, first, *rows)
       for kind, what, first in (("", "GELU: its argument and share", 4), ("gated ", "SwiGLU: gate and up", 8))
       for gates, rows in (
           ("experts", ([], [Row("gates: softmax of the chosen", "choice", 8), Row("balance: softmax", "route", 8)])),
           ("an expert each", ([Row("softmax, and scores", "route", 8)],
                               [Row("gates", "choice", 4), Row("balance: softmax", "route", 4)])))},
}
# Behind these, norms of queries and keys. What they take is one array with the values in it; and so, unless keys are
# turned then, is what comes back of a ring's keys.
NORMED = {"mixed": [Row("queries, to be normalised", "query", 2), Row("keys, to be normalised", "key", 2)],
          "float32": [Row("queries, as they are and normalised", "query", 8, 8), Row("1/rms", "head", 4, 4),
                      Row("their cotangent", "query", 0, 4),
                      Row("keys, as they are and normalised", "key", 8, 8), Row("1/rms", "key head", 4, 4),
                      Row("their cotangent", "key", 0, 4), Row("values, beside them", "value", 4, 4)]}
NORMED |= {"mixed, ring": NORMED["mixed"],
           "float32, ring": [*NORMED["float32"], Row("cotangent of values, beside that of keys", "value", 0, 4)]}
# Behind these, rotary positions.
TURNED = {"mixed": [], "mixed, latents": [], "float32": [Row("cos and sin of queries' angles, of keys'", "turn", 8)],
          "float32, latents": [Row("cos and sin of queries' angles", "turn", 4, behind="attention.q"),
                               Row("of keys'", "turn", 4, behind="attention.down")]}
EMBEDDING = {
    "mixed": [DROPPED["mixed"]],
    "float32": [Row("tokens", "token", 8), DROPPED["float32"]],
    "float32, divided": [Row("tokens, and whose row they are", "token", 9), DROPPED["float32"]],
}
# Of a further depth (nn/multi_token.py), before its block. What the one before it has made is kept by that one's norm.
AHEAD = {
    "mixed": [Row("embeddings", "whole", 2), Row("both normalised, put together", "whole", 4)],
    "float32": [Row("features, normalised", "whole", 4), Row("1/std", "row", 4), *norm("embeddings"),
                Row("both, put together", "whole", 8)],
}
# The same where adapters alone are trained: no gradient comes to embeddings, nor to the matrix that joins both.
AHEAD_OF_ADAPTERS = {"mixed": [], "float32": AHEAD["float32"][:2]}
# Scores: mixed: in float32 for the loss; float32: they and their softmax; divided: their exponentials. By tiles: none.
OUTPUT = {
    "mixed": [Row("norm: its input", "whole", 2), Row("output layer: its input", "input", 2, 2, "head"),
              Row("its cotangent", "logit", 0, 2, "head"), Row("scores", "logit", 4)],
    "float32": [*norm("norm"), Row("output layer: its input", "input", 4, 4, "head"),
                Row("its cotangent", "logit", 0, 4, "head"), Row("scores, softmax", "logit", 8),
                Row("labels", "token", 8, 8)],
    **{f"{precision}, by tiles": [*first, Row("output layer: its input", "input", size, size, "head"),
                                  Row("largest scores, sums of exponentials", "token", 8, 8, "head"),
                                  Row("the losses' cotangents", "token", 0, 4, "head"), *labels]
       for precision, size, first, labels in (("mixed", 2, [Row("norm: its input", "whole", 2)], []),
                                              ("float32", 4, norm("norm"), [Row("labels", "token", 8, 8)]))},
    # The loss takes scores by two indices, of which rows are one.
    "float32, divided": [*norm("norm"), Row("output layer: its input", "input", 4, 4, "head"),
                         Row("its cotangent", "logit", 0, 4, "head"), Row("exponentials of scores", "logit", 4),
                         Row("rows, and labels: places, sums, whose they are", "token", 21)],
}
INPUT = {"mixed": 2, "float32": 4}      # of a block, per element: what a checkpoint keeps


def block_of(job):
    """The rows of one block, in the order of the ops."""
    model, precision = job.model, job.precision
    experts = "an expert each" if model.top_k == 1 and precision == "float32" else "experts"
    kind = ["gated"] * (model.gates > 1) + [experts] * bool(model.experts)
    ring = ", ring" if job.cp > 1 and job.cp_by == "ring" else ""
    latents = model.latent is not None
    turned = [] if model.family == "gpt" else TURNED[precision + ", latents" * latents]
    attention = ATTENTION[precision + ring]
    if model.heads == job.tp and (job.adapters is None or "attention.out" in job.adapters.layers
                                  or fused("attention.out", job)):
        # Of one head a ring's result is the projection's input as it stands: one array.
        attention = [row for row in attention if row.per != "result"]
    normed = NORMED[precision + ring * (not turned)] if model.qk_norm else []
    if normed and precision == "float32" and (ring or job.cp == 1):     # the values are those beside queries and keys
        attention = [row for row in attention if row.what != "values"]
    rows = [*(LATENTS if latents else QKV)[precision], *normed, *turned, *attention, *PROJECTION[precision],
            *FEED_FORWARD[", ".join([precision, " ".join(kind)]) if kind else precision]]
    return rows if job.tp == 1 else divided(rows, job)


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


def with_adapters(rows, job, flows=True):
    """Of these rows, in the order of the ops, those that are kept where adapters alone are trained; and theirs.

    flows   whether a gradient flows to the first op's input: nothing is kept of what is before the first adapter
    A frozen matrix needs no input of its own: only where an adapter does, it is kept, or where this library's tape
    keeps it for all that (`fused`). W has adapters alone to come to.
    """
    if job.adapters is None:
        return rows
    layers, size, found = job.adapters.layers, job.sizes["parameter"], []
    comes = flow(job.adapters, job.model.takes, not flows)
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
    biased = ("attention.qkv", "mlp.0", *["attention.out", "mlp.2"] * (job.tp == 1))
    return job.model.family == "gpt" and layer in biased


class Kept(NamedTuple):
    """Bytes that a rank keeps of a micro-batch in a stage.

    until_backward  from F to B or I
    in_backward     more than these, for a while, in B
    in_input        the same, in I
    late            from I to W
    """

    until_backward: float
    in_backward: float
    in_input: float
    late: float


def activations(job, stage, samples):
    """Kept, of so many samples in a stage (blocks that the rank has, whether it has the embedding, whether the output
    layer). With checkpointing only a block's input is kept, and backward has one block at a time whole."""
    numbers, first, last = stage
    counts = {window: elements(job, samples, window) for window in {None, *map(job.model.window_of, numbers)}}
    count, ends = counts[None], _ends(job)
    before = EMBEDDING[ends] if first else [Row("auxiliary loss", "row", job.sizes["parameter"])] * bool(
        job.model.experts)
    if first and job.cp > 1 and job.precision == "float32" and job.model.family == "gpt":
        before = [*before, Row("positions", "position", 8)]
    of_depths = [depth(job, k, samples) for k in range(1, 1 + job.depth)]
    before = with_adapters(before, job, False)
    output = _output(job) if last else []
    behind, rows = with_adapters(output, job), block_of(job)
    block, begin = with_adapters(rows, job), with_adapters(rows, job, False)
    if job.cp > 1 and not job.tiled_loss:       # its labels aren't a view of the batch's, but a copy, which I drops
        behind = [row._replace(late=0) if row.what == "labels" else row for row in behind]

    before, behind = in_bytes(before, count, job), in_bytes(behind, count, job)
    of_block, of_begin = ({window: in_bytes(rows, each, job) for window, each in counts.items()}
                          for rows in (block, begin))
    blocks = [(of_begin if first and i == numbers[0] else of_block)[job.model.window_of(i)] for i in numbers]
    if job.checkpointing:
        inputs = count["whole"] * INPUT[job.precision]
        own_labels = any(row.what == "labels" for row in output)
        labels = 8 * count["token"] * own_labels        # the program's: they stay
        begins = first and begin is not block       # what nothing is trained before keeps no input
        own, most = together(before), 0
        for i, rows in enumerate(blocks):       # each runs again when those behind it are through
            own += inputs
            most = max(most, own + together(rows) - inputs * (i > 0 or not begins) + labels)
        own += together(behind)
        for ahead, inputs, again, behind in of_depths:      # a depth is through before the one before it begins
            most = max(most, own + ahead + again)
            own += ahead + inputs + behind
        return Kept(own, max(0, most - own), 0, 0)
    kept = sum(map(together, [before, *blocks, behind])) + sum(it.ahead + it.block + it.behind for it in of_depths)
    if first:       # nobody waits for its input's gradient: all is left to W
        return Kept(kept, 0, 0, kept)
    now = most = 0
    rows = [row for part in (*blocks, behind) for row in part][::-1]
    for row in sorted(rows, key=lambda row: not row.what.startswith("balance")):     # the auxiliary loss goes first
        now += row.late - row.nbytes
        most = max(most, now)
    return Kept(kept, 0, most, kept + now)


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
    count = elements(alone, samples, alone.model.window_of(0))
    whose = [Row("tokens, and whose row they are", "token", 9)] * (_ends(job) == "float32, divided")
    before = [*AHEAD[job.precision], *whose] if job.adapters is None else AHEAD_OF_ADAPTERS[job.precision]
    ahead, block, behind = (together(in_bytes(rows, count, job)) for rows in (
        before, with_adapters(block_of(alone), alone), with_adapters(_output(job), alone)))
    return Depth(ahead, count["whole"] * INPUT[job.precision], block, behind)


def in_bytes(rows, count, job):
    """Those of the rows that are there, with the bytes of all their elements; count: {per: how many there are}."""
    return [row._replace(nbytes=row.nbytes * count[row.per], late=row.late * count[row.per]) for row in rows
            if job.model.dropout or not row.what.startswith("dropout")]


def together(rows):
    """Bytes of rows in_bytes."""
    return sum(row.nbytes for row in rows)
