"""How the answers of this chapter are called, where it isn't simply once."""

RANKS = [2 ** i for i in range(13)]


def plan(learner, inputs, run):
    """The plan, and for the picture what the learner's own 14.1 says of the same model."""
    bytes_per_rank = run.earlier["bytes_per_rank"]
    model = [[sum(bytes_per_rank(inputs["parameters"], n, stage).values()) for n in RANKS] for stage in range(4)]
    return {"result": learner(**inputs, bytes_per_rank=bytes_per_rank), "ranks": RANKS, "model": model}
