# 12.3: the most costly stage costs
from functools import cache


def cut_layers(costs, stages):
    costs = [int(1000 * c) for c in costs]
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
