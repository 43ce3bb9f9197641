# 12.1: tuples and recursion; GPipe goes back from the last micro-batch
import numpy as np


def gpipe(stages, micro_batches):
    row = tuple(("F", k) for k in np.arange(micro_batches)) + tuple(("B", k) for k in np.arange(micro_batches)[::-1])
    return [row] * stages


def one_forward_one_backward(stages, micro_batches):
    return tuple(of_stage(0, 0, min(stages - s, micro_batches), micro_batches) for s in range(stages))


def of_stage(ahead, back, most, count):
    if back == count:
        return []
    if ahead < count and ahead - back < most:
        return [["F", ahead]] + of_stage(ahead + 1, back, most, count)
    return [["B", back]] + of_stage(ahead, back + 1, most, count)
