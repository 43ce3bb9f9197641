# 12.1: generators, backwards and forwards dealt out by turns
from itertools import chain, zip_longest


def gpipe(stages, micro_batches):
    for _ in range(stages):
        yield ((kind, k) for kind in "FB" for k in range(micro_batches))


def one_forward_one_backward(stages, micro_batches):
    rows = []
    for left in range(stages, 0, -1):
        warm = min(left, micro_batches)
        forwards = [("F", k) for k in range(micro_batches)]
        backwards = [("B", k) for k in range(micro_batches)]
        turns = chain.from_iterable(zip_longest(backwards, forwards[warm:]))
        rows.append(forwards[:warm] + [step for step in turns if step])
    return rows
