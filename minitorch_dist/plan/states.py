"""Attention by states (nn/states.py, nn/delta_rule.py) on paper: its products, and what a rank keeps for backward.

A sequence that ranks share is cut into pieces, and each piece into stretches. Counts are those of the library's own
code, which the ledger confirms.
"""

from ..nn.linear_attention import OF_STATES
from ..nn.states import stretches
from ..nn.windows import DELTA

PROJECT = "attention.project"
# {product: the products that its inputs are made of}, as GPT.takes has them.
LINEAR_TAKES = {
    "attention.scores": (PROJECT, PROJECT), "attention.values": ("attention.scores", PROJECT),
    "attention.states": (PROJECT, PROJECT), "attention.between": (PROJECT, "attention.states"),
    "attention.reads": (PROJECT, "attention.between"), "attention.out": ("attention.values",)}
# "alike": keys with each other; "inverse": of the systems of equations; "written", "taken": what they give; "replaced":
# what is taken of a state; "begun": of one whose elements are constants.
DELTA_TAKES = LINEAR_TAKES | {f"attention.{name}": (PROJECT, PROJECT) for name in (
    "alike", "inverse", "written", "taken", "replaced")} | {"attention.begun": (PROJECT,)}


def pieces_of(cp):
    """Into how many pieces ranks that share a sequence cut their part of it: a zigzag's two."""
    return 1 if cp == 1 else 2


def takes(window):
    """{product: the products that its inputs are made of} of attention by such states."""
    return DELTA_TAKES if window == DELTA else LINEAR_TAKES


def flops(model, window, tokens, time, cp):
    """{product: FLOPs}, forward, of stretches of each of a rank's pieces, and of the pieces of all ranks; as
    GPT.block_flops."""
    pieces, size = pieces_of(cp), model.width // model.heads
    count, length = stretches(time // (cp * pieces), size)
    rows = tokens * cp * pieces / time * count * length     # those of the last stretch that are missing too
    within, states = (2 * rows * each * model.width for each in (length, size))
    several, divided, sequences = count > 1, cp > 1, tokens * cp / time
    wide = 1 + divided * (window == DELTA)      # with what a piece leaves of what is before it
    reads = several * wide * states + divided * 2 * tokens * size * model.width
    found = {"scores": within, "values": within}
    if window == DELTA:
        known = divided * (cp * pieces - 2)     # pieces before which and behind which are others
        inverse = rows / length * model.heads * inverse_flops(length)
        begun = divided * wide * states * (1 / count + (not several))
        found |= {"alike": within, "inverse": inverse, "written": within, "taken": (several or divided) * within,
                  "replaced": wide * states * (count - 1) / count, "begun": begun,
                  "states": wide * states * (count - 1 + divided) / count, "values": wide * within,
                  "between": 2 * sequences * known * size ** 2 * model.width, "reads": reads}
    else:
        between = several * rows / length * count + divided * sequences * (cp * pieces) ** 2
        found |= {"states": (several or divided) * states, "between": 2 * between * size * model.width, "reads": reads}
    return {f"attention.{name}": number for name, number in found.items()}


def inverse_flops(size):
    """Of nn/delta_rule.py's inverse of a matrix of this size."""
    if size <= 2:
        return 0
    half = (size + 1) // 2
    return 4 * half ** 3 + 2 * inverse_flops(half)


def elements(job, samples, window):
    """activations.elements of attention by states, of a rank's pieces of sequences, each in stretches: its own kinds.

    projected  what x is projected to, of its share
    query, key, value, result  features of all heads, of its share, whatever other blocks have
    padded, unpadded  the same, where the last stretch has fewer positions than the others; where it hasn't
    found    the same, of what states give, in stretches, or of a sequence's pieces put together
    behind   the same, in stretches, where anything is before or behind them
    table, pairs  positions of a stretch by those before, and what was before it all; without that
    state, states, between  of several stretches: what each leaves; what is before each and behind the last; what is
             left of each behind another
    mask     bytes that say which of stretches, of positions and of pieces comes first
    ends, carried  where ranks have pieces: what is left, before each of several stretches, of what came before; queries
             by it
    parts, before, among, order  of all ranks' pieces: what each leaves, and its log; what is before each and behind the
             last; what is left of each behind another; which is which
    Of the delta rule some are others; see of_delta_rule.
    """
    model, pieces = job.model, pieces_of(job.cp)
    time, size, everyone = job.time // job.cp // pieces, model.width // model.heads, pieces * job.cp
    count, length = stretches(time, size)
    whole, several, divided = count * length == time, count > 1, job.cp > 1
    once = samples * model.heads / job.tp       # of each head of a sequence
    each = once * pieces
    plain, full = each * time * size, each * count * length * size
    found = {
        "projected": samples * time * pieces * (4 * model.width + OF_STATES[window].numbers * model.heads) / job.tp,
        **dict.fromkeys(("query", "key", "value", "result"), plain), "unpadded": plain * whole,
        "padded": full * (not whole), "found": plain if divided else full, "behind": full * (several or divided),
        "table": each * count * length * (length + 1), "pairs": each * count * length ** 2,
        "state": each * several * count * size ** 2, "states": each * several * (count + 1) * size ** 2,
        "between": each * several * count * (count + 1),
        "mask": 2 * (pieces * (length * (length + 1) + several * count * (count + 1))
                     + divided * everyone * (everyone + 1)),
        "ends": each * several * divided * (count + 1), "carried": full * several * divided,
        "parts": once * divided * everyone * (size ** 2 + 1), "before": once * divided * (everyone + 1) * size ** 2,
        "among": once * divided * everyone * (everyone + 1), "order": divided * everyone}
    return found | (of_delta_rule(job, samples) if window == DELTA else {})


def of_delta_rule(job, samples):
    """`elements` of the delta rule that linear attention hasn't, or has otherwise.

    stretched  features of all heads, in stretches
    rates     of each head and position, of its share, where the last stretch has fewer positions than the others
    unsolved  what is kept of each stretch's system of equations while its inverse is made, and the inverse
    several   the same where there are several: of one before which a piece begins nothing is kept, it has no gradient
    wide, replacing  of the values' features, or of these and the keys', where ranks have pieces: of all stretches, of
              those that leave a state
    state, states, begun  of several stretches, of so many features: what is before each but the first; before each,
              together; what is before a piece
    mask      with which of its equations are which
    reads     queries of a piece, for what is before it, and what they find in it
    parts, before, between  of all ranks' pieces: what each leaves, and what it leaves of what was before it; what is
              before each, and before each but the first two and the last
    """
    model, pieces = job.model, pieces_of(job.cp)
    time, size, everyone = job.time // job.cp // pieces, model.width // model.heads, pieces * job.cp
    count, length = stretches(time, size)
    whole, several, divided = count * length == time, count > 1, job.cp > 1
    once = samples * model.heads / job.tp
    each, wide = once * pieces, size * (1 + divided)
    kept, result = unsolved(length)
    return {
        "rates": each * count * length * (not whole), "unsolved": each * count * (kept + result),
        "stretched": each * count * length * size, "several": each * count * length * size * several,
        "wide": each * count * length * wide,
        "replacing": each * (count - 1 + divided) * length * wide,
        "state": each * (count - 1) * size * wide, "states": each * count * size * wide * (several or divided),
        "begun": pieces * divided * size * wide,
        "mask": pieces * (2 * length * (length + 1) + length ** 2 + smallest(length) ** 2),
        "reads": each * count * length * wide * divided,
        "parts": once * divided * everyone * 2 * size ** 2, "before": once * divided * everyone * size ** 2,
        "between": once * divided * (everyone - 3) * size ** 2}


def unsolved(size):
    """(elements that nn/delta_rule.py's inverse keeps of a matrix of this size, of what it gives)."""
    if size <= 2:
        return 0, size ** 2
    if size % 2:
        return unsolved(size + 1)
    half = size // 2
    kept, result = unsolved(half)
    return size ** 2 + 2 * kept + 2 * result + half ** 2, size ** 2


def smallest(size):
    """The size at which it ends."""
    return size if size <= 2 else smallest((size + 1) // 2)
