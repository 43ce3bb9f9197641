# 12.3: the most costly stage costs
def cut_layers(costs, stages):
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(filled(costs, middle)) <= stages:
            high = middle
        else:
            low = middle + 1
    cut = filled(costs, low)
    while len(cut) < stages:
        at = next(i for i, stage in enumerate(cut) if len(stage) > 1)
        cut[at:at + 1] = [cut[at][:1], cut[at][1:]]
    return cut


def filled(costs, limit):
    cut, held = [[]], 0
    for i, cost in enumerate(costs):
        if held + cost > limit and cut[-1]:
            cut.append([])
            held = 0
        held += cost
        cut[-1].append(i)
    return cut
