"""14.1 What a model weighs on each rank.

Mixed precision with Adam: forward and backward in 16 bits, so parameters and gradients are of 16 bits; but steps are
too small to be added in 16 bits, so the optimizer holds a copy of the parameters in 32 bits, and its two means too.
"""


def bytes_per_rank(parameters, ranks, stage):
    """Bytes that model and optimizer take on each rank.

    parameters  how many the model has
    ranks       how many ranks train it together
    stage       of ZeRO: what is divided evenly among the ranks, where otherwise each rank holds all of it
                0 nothing   1 the optimizer's arrays   2 the gradients too   3 the parameters too

    Returns {"parameters": …, "gradients": …, "optimizer": …}, numbers of bytes. Where something doesn't divide evenly,
    the mean over the ranks, a fraction of a byte included.
    """
    # begin with the bytes that one parameter takes in each of the three, undivided; and from which stage on each of the
    # three is divided
    each = {"parameters": 2, "gradients": 2, "optimizer": 4 + 4 + 4}
    divided_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return {part: parameters * each[part] / (ranks if stage >= divided_from[part] else 1) for part in each}
