# 12.3: is possible: look at every place
def cut_layers(costs, stages):
    low, high = max(costs), sum(costs)
    for _ in range(20):
        middle = (low + high) / 2
        if len(filled(costs, stages, middle)) > stages:
            low = middle
        else:
            high = middle
    return filled(costs, stages, high)


def filled(costs, stages, limit):
    cut, stage = [], []
    for i in range(len(costs)):
        to_come = len(costs) - i
        if stage and (sum(costs[k] for k in stage) + costs[i] > limit or to_come < stages - len(cut)):
            cut.append(stage)
            stage = []
        stage.append(i)
    return [*cut, stage]
