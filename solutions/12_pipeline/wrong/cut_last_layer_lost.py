# 12.3: Each must be there once
def cut_layers(costs, stages):
    from itertools import combinations
    n, best = len(costs) - 1, None
    if stages > 3 or n < stages:
        bounds = [n * i // stages for i in range(stages + 1)]
        return [list(range(a, b)) for a, b in zip(bounds, bounds[1:])]
    for inner in combinations(range(1, n), stages - 1):
        bounds = (0, *inner, n)
        most = max(sum(costs[a:b]) for a, b in zip(bounds, bounds[1:]))
        if best is None or most < best[0]:
            best = most, bounds
    return [list(range(a, b)) for a, b in zip(best[1], best[1][1:])]
