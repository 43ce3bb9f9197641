# 12.1: the warm-up has put off
def gpipe(stages, micro_batches):
    every = range(micro_batches)
    return [[("F", k) for k in every] + [("B", k) for k in every] for _ in range(stages)]


def one_forward_one_backward(stages, micro_batches):
    rows = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage) - 1
        row = [("F", k) for k in range(warm_up)]
        for k in range(warm_up, micro_batches):
            row += [("F", k), ("B", k - warm_up)]
        rows.append(row)
    return rows
