# 12.3: a table from the last stage, ranges in a tuple
def cut_layers(costs, stages):
    n = len(costs)
    best = {(1, i): (sum(costs[i:]), n) for i in range(n)}
    for parts in range(2, stages + 1):
        for i in range(n - parts + 1):
            here, found = 0, (float("inf"), None)
            for j in range(i + 1, n - parts + 2):
                here += costs[j - 1]
                found = min(found, (max(here, best[parts - 1, j][0]), j))
            best[parts, i] = found
    cut, i = [], 0
    for parts in range(stages, 0, -1):
        j = best[parts, i][1]
        cut.append(range(i, j))
        i = j
    return tuple(cut)
