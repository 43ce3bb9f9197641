"""14.2 What a step costs on the wire.

A reduce-scatter leaves each rank with the sum of its share; an all-gather hands everybody's share to everybody. In a
ring each takes N − 1 messages of 1/N of the data. An all-reduce is one after the other.
"""


def bytes_sent(parameters, ranks, stage):
    """Bytes that each rank sends in one training step, by collective, with rings.

    parameters  how many the model has; gradients and parameters travel in 16 bits
    ranks       how many ranks train it together
    stage       of ZeRO
                0      every rank needs the sum of all gradients
                1, 2   a rank needs the sum for its share only, updates its share of the parameters, and then all ranks
                       need all of them
                3      as 2, but the parameters aren't kept: they come when forward needs them and once more when
                       backward does, instead of after the update

    Returns {"all_reduce": …, "reduce_scatter": …, "all_gather": …}, numbers of bytes; 0 where a stage doesn't use it.
    Where the data doesn't divide evenly, the mean over the ranks, a fraction of a byte included.
    """
    raise NotImplementedError("begin with one reduce-scatter of all gradients: N − 1 messages, of how many bytes each?")
