"""How the answers of this chapter are called, where it isn't simply once."""

from functools import wraps

RANKS = [2 ** i for i in range(13)]
CUT_UP = 100_000     # tries with nodes that aren't whole, until it is said: with large ones they would take hours


def plan(learner, inputs, run):
    """The plan, and for the picture what the learner's own 14.1 says of the same model."""
    bytes_per_rank = run.earlier["bytes_per_rank"]
    model = [[sum(bytes_per_rank(inputs["parameters"], n, stage).values()) for n in RANKS] for stage in range(4)]
    bytes_per_rank = of_whole_nodes(bytes_per_rank, inputs["per_node"])
    return {"result": learner(**inputs, bytes_per_rank=bytes_per_rank), "ranks": RANKS, "model": model}


def of_whole_nodes(bytes_per_rank, per_node):
    """The learner's own 14.1, which gives up on who asks it for numbers of devices one by one."""
    tries = 0

    @wraps(bytes_per_rank)
    def asked(parameters, ranks, stage):
        nonlocal tries
        tries += ranks % per_node > 0
        if tries > CUT_UP:
            raise ValueError(f"nodes are cut up: the devices come in whole nodes, here of {per_node:,}, and {CUT_UP:,} "
                             "times bytes_per_rank was asked about other numbers of them")
        return bytes_per_rank(parameters, ranks, stage)
    return asked
