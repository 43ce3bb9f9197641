# 12.3: 20000004, and 20000003 is possible
from functools import cache

import numpy as np


def cut_layers(costs, stages):
    costs = list(np.float32(costs))
    @cache
    def best(layers, parts):
        if parts == 1:
            return sum(costs[:layers]), (0,)
        choices = []
        for at in range(parts - 1, layers):
            most, begins = best(at, parts - 1)
            choices.append((max(most, sum(costs[at:layers])), (*begins, at)))
        return min(choices)

    begins = (*best(len(costs), stages)[1], len(costs))
    return [list(range(a, b)) for a, b in zip(begins, begins[1:], strict=False)]
