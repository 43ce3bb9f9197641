# 14.2: message by message
def bytes_sent(parameters, ranks, stage):
    found = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), 0)
    half = sum(2 * parameters / ranks for _ in range(1, ranks))
    if stage == 0:
        found["all_reduce"] += 2 * half
        return found
    found["reduce_scatter"] += half
    for _ in range(1 + (stage == 3)):
        found["all_gather"] += half
    return found
