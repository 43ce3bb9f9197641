"""How the answers of this chapter are called, where it isn't simply once."""

from functools import wraps

RANKS = [2 ** i for i in range(13)]
CUT_UP = 100_000     # tries with nodes that aren't whole, until it is said: with large ones they would take hours
IN_VAIN = 10_000     # tries where no number of devices is enough


def plan(learner, inputs, run):
    """The plan, and for the picture what the learner's own 14.1 says of the same model."""
    bytes_per_rank = run.earlier["bytes_per_rank"]
    model = [[sum(bytes_per_rank(inputs["parameters"], n, stage).values()) for n in RANKS] for stage in range(4)]
    left = inputs["memory_gib"] * 2 ** 30 - inputs["activations"]
    bytes_per_rank = of_whole_nodes(bytes_per_rank, inputs["per_node"], left)
    return {"result": learner(**inputs, bytes_per_rank=bytes_per_rank), "ranks": RANKS, "model": model}


def of_whole_nodes(bytes_per_rank, per_node, left):
    """The learner's own 14.1, which gives up on who asks it for numbers of devices one by one, or goes on asking where
    no bytes are left for the model."""
    tries = asked_in_all = 0

    @wraps(bytes_per_rank)
    def asked(parameters, ranks, stage):
        nonlocal tries, asked_in_all
        tries, asked_in_all = tries + (ranks % per_node > 0), asked_in_all + 1
        if left <= 0 and asked_in_all > IN_VAIN:
            raise ValueError("the activations fill the memory, to the last byte or beyond, and nothing is left for the "
                             f"model: it fits on no number of devices, and {asked_in_all:,} tries are too many")
        if tries > CUT_UP:
            raise ValueError(f"nodes are cut up: the devices come in whole nodes, here of {per_node:,}, and {CUT_UP:,} "
                             "times bytes_per_rank was asked about other numbers of them")
        return bytes_per_rank(parameters, ranks, stage)
    return asked
