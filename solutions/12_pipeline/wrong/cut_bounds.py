# 12.3: must be a list with a list of layer numbers per stage
def cut_layers(costs, stages):
    n = len(costs)
    return [n * i // stages for i in range(stages + 1)]
