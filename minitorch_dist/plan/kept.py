"""What is kept of a forward pass for backward, as tables: rows of an op, how many bytes for each element of what.

"mixed" is Megatron-LM in 16 bits, from the paper: 34·s·b·h + 5·a·s²·b bytes per block; on t tensor-parallel ranks
10·s·b·h + (24·s·b·h + 5·a·s²·b)/t, and with sequence parallelism ("regather") all of it divided by t. "float32" is this
library's own tape, on the CPU: what the ledger counts as "activation", to the byte.

Where backward is cut in two (parallel/pipelines/schedules.py), I frees what W doesn't need, and keeps the cotangents of
matrices for it: 32·s·b·h bytes per block in 16 bits.

Sources: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models"; Qi et al. 2023, "Zero
bubble pipeline parallelism" (what W needs).
"""

from typing import NamedTuple

from ..nn.windows import DELTA, LINEAR


class Row(NamedTuple):
    """nbytes are kept by an op for each element of `per` (see activations.elements); `late` of them while only W is to
    come.
    of: the matrices whose gradients alone it is kept for. behind: the product whose output's gradient it is kept for,
    where that isn't the one before."""

    what: str
    per: str
    nbytes: int
    late: int = 0
    of: str = ""
    behind: str = ""


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
# Attention by states up to its projection: what x is projected to, and norms of queries and keys; then states.
PROJECTED = {
    "mixed": [Row("first norm: its input", "whole", 2),
              Row("queries, keys, values, gates: their input", "input", 2, 2, "attention.project"),
              Row("what they are, with decays", "projected", 2),
              Row("cotangent", "projected", 0, 2, "attention.project")],
    "float32": [*norm("first norm"),
                Row("queries, keys, values, gates: their input", "input", 4, 4, "attention.project"),
                Row("what they are, with decays", "projected", 4),
                Row("cotangent", "projected", 0, 4, "attention.project")]}
PROJECTED |= {      # norms of queries and keys keep what these are for W
    "mixed, normed": [*PROJECTED["mixed"], Row("queries and keys, normalised", "query", 4)],
    "float32, normed": [*(row._replace(late=4) if row.per == "projected" else row for row in PROJECTED["float32"]),
                        Row("queries, keys, normalised", "query", 8, 8), Row("1/rms", "head", 8, 8),
                        Row("cotangent of queries", "query", 0, 4)]}
RESULT = {"mixed": [Row("result, normalised", "result", 4)],
          "float32": [Row("result", "found", 4, 4), Row("normalised", "query", 4, 4), Row("1/rms", "head", 4, 4),
                      Row("its cotangent", "query", 0, 4), Row("to be gated", "result", 4)]}
OF_LINEAR = {
    "mixed": [Row("decays", "head", 4), Row("what is left", "table", 2),
              Row("scores, and what is left of them", "pairs", 4), Row("keys, as they are left", "behind", 2),
              Row("queries, as they read", "behind", 2), Row("states, and put together", "states", 4),
              Row("states of all pieces", "parts", 4), Row("put together", "before", 4)],
    "float32": [Row("decays", "head", 5), Row("their cotangent", "head", 0, 4),
                Row("queries, scaled", "unpadded", 4), Row("queries, keys, values, in stretches", "padded", 12),
                Row("tables of what comes first", "mask", 1), Row("what is left", "table", 4),
                Row("scores, and what is left of them", "pairs", 8),
                Row("keys, as they are left", "behind", 4), Row("queries, as they read", "behind", 4),
                Row("states", "state", 4), Row("states, put together", "states", 4),
                Row("what is left between", "between", 4), Row("of what was before", "ends", 4),
                Row("queries, as they read that", "carried", 4), Row("states of all pieces", "parts", 4),
                Row("their order", "order", 8), Row("put together", "before", 4), Row("left between", "among", 4)]}
OF_DELTA = {
    "mixed": [Row("keys, normalised, of unit length", "query", 6), Row("decays, rates", "head", 6),
              Row("what is left", "table", 2), Row("keys, values, by rates", "stretched", 4),
              Row("keys with each other", "pairs", 2), Row("equations, and what solves them", "unsolved", 2),
              Row("keys that take, by rates, and are left", "behind", 4), Row("as they take", "several", 2),
              Row("values that replace", "replacing", 2), Row("together", "wide", 2),
              Row("scores, and what is left of them", "pairs", 4), Row("queries, as they read", "several", 2),
              Row("states, and put together", "states", 4), Row("queries, as they read what is before", "reads", 2),
              Row("states of all pieces", "parts", 4), Row("put together", "before", 4)],
    "float32": [Row("keys, normalised", "query", 4), Row("1/rms", "head", 4), Row("of unit length", "unpadded", 4),
                Row("decays", "head", 5), Row("their cotangent", "head", 0, 4), Row("rates", "head", 4),
                Row("queries, scaled", "unpadded", 4), Row("queries, keys, values, in stretches", "padded", 12),
                Row("rates, in stretches", "rates", 4),
                Row("tables of what comes first", "mask", 1), Row("what is left", "table", 4),
                Row("keys, values, by rates", "stretched", 8), Row("keys with each other", "pairs", 4),
                Row("equations, and what solves them", "unsolved", 4),
                Row("keys that take, by rates", "behind", 4), Row("as they do", "several", 4),
                Row("keys, as they are left", "behind", 4),
                Row("values that replace", "replacing", 4), Row("together", "wide", 4),
                Row("states", "state", 4), Row("what a piece begins with", "begun", 4),
                Row("states, put together", "states", 4), Row("scores, and what is left of them", "pairs", 8),
                Row("queries, as they read", "several", 4), Row("queries of pieces, and what they find", "reads", 4),
                Row("states of all pieces", "parts", 4), Row("their order", "order", 8),
                Row("put together", "before", 4), Row("one after another", "between", 4)]}
# What norms of keys keep besides, by what takes these.
KEYS = {LINEAR: [Row("cotangent of keys", "found", 0, 4), Row("keys", "unpadded", 4)],
        DELTA: [Row("cotangent of keys", "query", 0, 4), Row("keys", "query", 4)]}
OF_STATES = {   # by window, by how they are made
    kind: {precision + normed: [*PROJECTED[precision + normed], *KEYS[kind] * (precision + normed == "float32, normed"),
                                *rows[precision], *RESULT[precision]]
           for precision in rows for normed in ("", ", normed")}
    for kind, rows in ((LINEAR, OF_LINEAR), (DELTA, OF_DELTA))}
# What sinks keep besides: they are a column of the scores, whose cotangent is looked into by theirs.
SINKS = [Row("sinks: scores, softmax; cotangent", "head", 8, 4), Row("cotangent of scores", "score", 0, 4)]
ATTENTION = {
    "mixed": [Row("queries", "query", 2), Row("keys", "key", 2), Row("softmax", "score", 2),
              Row("dropout of it: mask and result", "score", 3), Row("values", "value", 2)],
    "mixed, ring": [Row("queries", "query", 2), Row("keys", "key", 2), Row("values", "value", 2),
                    Row("sums of exponentials", "head", 4)],
    "float32": [Row("queries", "query", 4), Row("keys", "key", 4), Row("values", "value", 4),
                Row("softmax", "score", 4)],
    "float32, dropped": [Row("queries", "query", 4), Row("keys", "key", 4), Row("values", "value", 4),
                         Row("who sees whom", "pair", 1),
                         Row("scores, softmax, who stays, what is left", "score", 16)],
    "float32, sinks": [Row("queries", "query", 4), Row("keys", "key", 4), Row("values", "value", 4),
                       Row("who sees whom", "pair", 1), *SINKS, Row("scores, softmax, what is left", "score", 12)],
    "float32, ring": [Row("queries", "query", 4), Row("result", "result", 4), Row("keys", "key", 4),
                      Row("values", "value", 4), Row("sums of exponentials", "head", 4)],
}
# Of chosen blocks: in which order pairs of a query and a block are multiplied, and which place each has in it; where
# those of each block end.
ATTENTION |= {f"{kind}, blocks": [*(row for row in ATTENTION[kind] if not row.what.startswith("dropout")),
                                  Row("pairs with blocks: their order", "pair with a block", 16),
                                  Row("how many each block has", "block", 8)] for kind in ("mixed", "float32")}
ATTENTION["float32, dropped, sinks"] = [*ATTENTION["float32, sinks"][:-1], ATTENTION["float32, dropped"][-1]]
# Of gated attention: what is gated, which a ring has kept in any case, and sigmoids.
GATED = {kind: [Row("result", "result", size), Row("sigmoids of gates", "query", size)]
         for kind, size in (("mixed", 2), ("float32", 4))}
GATED["float32, ring"] = GATED["float32"][1:]
# Beside queries, keys and values; gates themselves where these, or what is normalised, are views of one array.
GATES = {kind: Row("cotangent of gates", "query", 0, size, "attention.qkv") for kind, size in (
    ("mixed", 2), ("float32", 4))} | {
    "viewed": Row("gates", "query", 4), "normed": Row("gates", "query", 4, 4)}
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
