# 12.3: a stage is empty
def cut_layers(costs, stages):
    share = sum(costs) / stages
    found, before = [[] for _ in range(stages)], 0
    for i, cost in enumerate(costs):
        found[min(stages - 1, int(before / share))].append(i)
        before += cost
    return found
