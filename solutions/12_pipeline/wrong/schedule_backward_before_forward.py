# 12.1: nothing is there yet to go back
def gpipe(stages, micro_batches):
    every = range(micro_batches)
    return [[("F", k) for k in every] + [("B", k) for k in every] for _ in range(stages)]


def one_forward_one_backward(stages, micro_batches):
    rows = []
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage - 1)
        row = [("F", k) for k in range(ahead)]
        for k in range(micro_batches - ahead):
            row += [("B", k), ("F", ahead + k)]
        rows.append(row + [("B", k) for k in range(micro_batches - ahead, micro_batches)])
    return rows
