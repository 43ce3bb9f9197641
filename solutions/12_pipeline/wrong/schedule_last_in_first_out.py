# 12.1: does its backwards in the order
def gpipe(stages, micro_batches):
    every = range(micro_batches)
    return [[("F", k) for k in every] + [("B", k) for k in every] for _ in range(stages)]


def one_forward_one_backward(stages, micro_batches):
    rows = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage)
        row = [("F", k) for k in range(warm_up)]
        held = list(range(warm_up))
        for k in range(warm_up, micro_batches):
            row += [("B", held.pop()), ("F", k)]
            held.append(k)
        rows.append(row + [("B", k) for k in reversed(held)])
    return rows
