# 12.3: must be a list with a list of layer numbers per stage
from functools import cache


def cut_layers(costs, stages):
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
    return [[float(i) for i in range(a, b)] for a, b in zip(begins, begins[1:], strict=False)]
