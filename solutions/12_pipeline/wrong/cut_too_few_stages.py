# 12.3: where 4 were asked for
def cut_layers(costs, stages):
    limit = max(costs)
    while True:
        found, held = [[]], 0
        for i, cost in enumerate(costs):
            if held + cost > limit:
                found.append([])
                held = 0
            found[-1].append(i)
            held += cost
        if len(found) <= stages:
            return found
        limit += 1
