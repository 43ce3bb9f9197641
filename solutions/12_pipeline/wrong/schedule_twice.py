# 12.1: stage 0 does F7 5 times, and a micro-batch counts once
def gpipe(stages, micro_batches):
    every = range(micro_batches)
    return [[("F", k) for k in every] + [("B", k) for k in every] for _ in range(stages)]


def one_forward_one_backward(stages, micro_batches):
    rows = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage)
        row = [("F", k) for k in range(warm_up)]
        for k in range(micro_batches):
            row += [("B", k), ("F", min(warm_up + k, micro_batches - 1))]
        rows.append(row)
    return rows
