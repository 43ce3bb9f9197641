# 12.1: it must be a list of 4 lists
def gpipe(stages, micro_batches):
    every = range(micro_batches)
    return [[("F", float(k)) for k in every] + [("B", k) for k in every] for _ in range(stages)]


def one_forward_one_backward(stages, micro_batches):
    rows = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage)
        row = [("F", k) for k in range(warm_up)]
        for k in range(micro_batches):
            row.append(("B", k))
            if warm_up + k < micro_batches:
                row.append(("F", warm_up + k))
        rows.append(row)
    return rows
