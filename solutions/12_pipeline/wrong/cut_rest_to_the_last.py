# 12.3: didn't take is left to the last
def cut_layers(costs, stages):
    share, found = sum(costs) / stages, [[]]
    for i, cost in enumerate(costs):
        full = found[-1] and sum(costs[j] for j in found[-1]) + cost > share
        enough = len(costs) - i <= stages - len(found)
        if len(found) < stages and (full or enough):
            found.append([])
        found[-1].append(i)
    return found
