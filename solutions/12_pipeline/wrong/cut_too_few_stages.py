# 12.3: where 4 were asked for
def cut_layers(costs, stages):
    n = len(costs)
    for limit in sorted({sum(costs[a:b]) for a in range(n) for b in range(a + 1, n + 1)}):
        if limit < max(costs):
            continue
        found, held = [[]], 0
        for i, cost in enumerate(costs):
            if held + cost > limit:
                found.append([])
                held = 0
            found[-1].append(i)
            held += cost
        if len(found) <= stages:
            return found
