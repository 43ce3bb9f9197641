"""What ZeRO's stages hold and send, on paper.

    stage    cut over the ranks                  bytes held, of ψ float32 parameters      sent per rank and step
    0 (DDP)  nothing                             4ψ + 4ψ + 8ψ                             2ψ elements · (N-1)/N
    1        the optimizer's state               4ψ + 4ψ + 8ψ/N                           2ψ
    2        gradients as well                   4ψ + 4ψ/N + 8ψ/N                         2ψ
    3        parameters as well                  4ψ/N + 4ψ/N + 8ψ/N                       3ψ
    3, near  and ψ/g until backward              the same                                 2ψ, and ψ · (g-1)/g nearby

(near: g neighbours keep values from forward to backward. Held: parameters + gradients + Adam's two states.) Frozen
parameters have neither gradients nor states, and are sent in stage 3 alone: it holds 4ψ/N of them, and gathers 2ψ.
Sources: Rajbhandari et al. 2020, "ZeRO", table 1 and section 7; Wang et al. 2023, "ZeRO++" (near).
"""

BYTES = {"parameter": 4, "gradient": 4, "optimizer": 8}     # per float32 parameter, with Adam
BYTES_MIXED = {"parameter": 2, "gradient": 2, "optimizer": 12}      # the paper's: 16 bits, and a float32 copy more
CUT = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradient"), 3: ("optimizer", "gradient", "parameter")}
SENT = {0: 2, 1: 2, 2: 2, 3: 3}     # elements per parameter, times (N-1)/N


def held(stage, elements, ranks, sizes=BYTES):
    """{kind: bytes} that a rank holds of a model of so many elements, trained with Adam, in a stage. sizes: bytes per
    element of each kind; as they stand, float32's."""
    return {kind: size * elements / (ranks if kind in CUT[stage] else 1) for kind, size in sizes.items()}


def sent(stage, elements, ranks, replicas=1):
    """Elements that a rank sends per step, where so many ranks share each of the replicas: (among them, to the other
    replicas)."""
    return SENT[stage] * elements * (ranks - 1) / ranks, 2 * elements / ranks * (replicas - 1) / replicas


def sent_near(elements, ranks, near):
    """(Elements of values, of gradients) that a rank sends per step in stage 3, where groups of `near` neighbours keep
    the values until backward. Gradients are as many in one step, or in two: within groups, then between them."""
    return elements * ((ranks - 1) / ranks + (near - 1) / near), elements * (ranks - 1) / ranks
