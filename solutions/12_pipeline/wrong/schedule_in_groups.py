# 12.1: units of time (a forward 1, a backward 2), and 33 are enough
def gpipe(stages, micro_batches):
    every = range(micro_batches)
    return [[("F", k) for k in every] + [("B", k) for k in every] for _ in range(stages)]


def one_forward_one_backward(stages, micro_batches):
    rows = []
    for stage in range(stages):
        row = []
        for first in range(0, micro_batches, stages):
            group = range(first, min(first + stages, micro_batches))
            warm_up = min(len(group), stages - stage)
            row += [("F", k) for k in group[:warm_up]]
            for k in group:
                row.append(("B", k))
                if k + warm_up in group:
                    row.append(("F", k + warm_up))
        rows.append(row)
    return rows
