# 12.3: look at every place where a stage may begin
def cut_layers(costs, stages):
    share, found, held = sum(costs) / stages, [[]], 0
    for i, cost in enumerate(costs):
        left = len(costs) - i
        if found[-1] and len(found) < stages and (held >= share * len(found) or left <= stages - len(found)):
            found.append([])
        found[-1].append(i)
        held += cost
    return found
