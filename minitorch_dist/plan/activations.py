"""What is kept of a forward pass for backward, as tables: a row per op, in bytes per element.

"mixed" is Megatron-LM in 16 bits, from the paper: 34·s·b·h + 5·a·s²·b bytes per block; on t tensor-parallel ranks
10·s·b·h + (24·s·b·h + 5·a·s²·b)/t, and with sequence parallelism ("regather") all of it divided by t. "float32" is this
library's own tape, on the CPU: what the ledger counts as "activation", to the byte. Source: Korthikanti et al. 2022,
"Reducing activation recomputation in large transformer models".
"""

from typing import NamedTuple


class Row(NamedTuple):
    """Bytes kept by an op.

    whole    per element of (batch, time, width), on every tensor-parallel rank; with sequence parallelism of its share
    inputs   the same, of what column-parallel matrices take: of a share only where backward gathers it again
    divided  the same, of a tensor-parallel rank's share
    scores   per element of (batch, heads, time, time), of a rank's share of the heads
    rows     per token, divided as `whole` is; tokens: never divided
    dropout  there with dropout only
    """

    what: str
    whole: int = 0
    inputs: int = 0
    divided: int = 0
    scores: int = 0
    rows: int = 0
    tokens: int = 0
    dropout: bool = False


NORM = Row("norm: its input, normalised, 1/std", whole=8, rows=4)
MASK = {"mixed": Row("dropout: mask", whole=1, dropout=True), "float32": Row("dropout: mask", whole=4, dropout=True)}
BLOCK = {
    "mixed": [
        Row("first norm: its input", whole=2), Row("queries, keys, values: their input", inputs=2),
        Row("queries and keys", divided=4), Row("softmax", scores=2),
        Row("dropout of it: mask and result", scores=3, dropout=True), Row("values", divided=2),
        Row("projection: its input", divided=2), MASK["mixed"],
        Row("second norm: its input", whole=2), Row("feed-forward: its input", inputs=2),
        Row("GELU: its argument", divided=8), Row("second matrix: its input", divided=8), MASK["mixed"]],
    "float32": [
        NORM, Row("queries, keys, values: their input", inputs=4), Row("queries, keys, values", divided=12),
        Row("softmax", scores=4), Row("projection: its input", divided=4), MASK["float32"],
        NORM, Row("feed-forward: its input", inputs=4), Row("GELU: its argument and share", divided=32),
        Row("second matrix: its input", divided=16), MASK["float32"]],
}
EMBEDDING = {
    "mixed": [MASK["mixed"]],
    "float32": [Row("tokens", tokens=8), MASK["float32"]],
    "float32, divided": [Row("tokens, and whose row they are", tokens=9), MASK["float32"]],
}
OUTPUT = {
    "mixed": [Row("norm: its input", whole=2), Row("output layer: its input", inputs=2)],
    "float32": [NORM, Row("output layer: its input", inputs=4), Row("labels", tokens=8)],
    "float32, divided": [NORM, Row("output layer: its input", inputs=4),
                         Row("labels: places, sums, whose they are", tokens=13)],
}
# Per score. Mixed: in float32 for the loss; float32: the scores and their softmax; divided: their exponentials.
LOGITS = {"mixed": 4, "float32": 8, "float32, divided": 4}
INPUT = {"mixed": 2, "float32": 4}      # of a block, per element: what a checkpoint keeps


def kept(rows, model, samples, time, tp=1, sequence_parallel=False):
    """Bytes that the rows of a table keep on a rank, of so many samples of `time` tokens. sequence_parallel: False,
    True or "regather", as in parallel/tensor_parallel.py."""
    elements, tokens, scores = samples * time * model.width, samples * time, samples * model.heads * time ** 2
    between, inputs = (tp if it else 1 for it in (sequence_parallel, sequence_parallel == "regather"))
    return sum(elements * (row.whole / between + row.inputs / inputs + row.divided / tp) + scores * row.scores / tp
               + tokens * (row.rows / between + row.tokens) for row in rows if model.dropout or not row.dropout)


def activations(model, precision, stage, samples, time, tp=1, sequence_parallel=False, checkpointing=False):
    """(bytes that a rank keeps of a micro-batch until its backward, how many more there are for a while in it).

    stage          (blocks that the rank has, whether it has the embedding, whether the output layer)
    checkpointing  of a block only its input is kept; backward then has one block at a time whole
    """
    def of(rows):
        return kept(rows, model, samples, time, tp, sequence_parallel)
    layers, first, last = stage
    tokens, block = samples * time, of(BLOCK[precision])
    ends = "float32, divided" if precision == "float32" and tp > 1 else precision
    before = of(EMBEDDING[ends]) if first else 0
    behind = of(OUTPUT[ends]) + LOGITS[ends] * tokens * -(-model.vocabulary // tp) if last else 0
    if last and ends == "float32, divided":
        behind += 8 * (samples + time)      # the loss takes scores by three indices, of which these two are the others
    if not checkpointing:
        return before + layers * block + behind, 0
    inputs = tokens * model.width * INPUT[precision] / (tp if sequence_parallel else 1)
    labels = 8 * tokens if last and ends == "float32" else 0        # the program's own: they stay
    return before + layers * inputs + behind, max(0, block - inputs - behind + labels)
