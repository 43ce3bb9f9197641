# 12.3: look at every place where a stage may begin
from functools import cache


def cut_layers(costs, stages):
    @cache
    def best(layers, parts):
        if parts == 1:
            return abs(sum(costs[:layers]) - sum(costs) / stages), (0,)
        choices = []
        for at in range(parts - 1, layers):
            most, begins = best(at, parts - 1)
            choices.append((max(most, abs(sum(costs[at:layers]) - sum(costs) / stages)), (*begins, at)))
        return min(choices)

    begins = (*best(len(costs), stages)[1], len(costs))
    return [list(range(a, b)) for a, b in zip(begins, begins[1:], strict=False)]
