# 12.3: the layers' order is changed
def cut_layers(costs, stages):
    found = [[] for _ in range(stages)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min(found, key=lambda stage: sum(costs[j] for j in stage)).append(i)
    return found
