# 12.3: of equally many layers aren't stages of equal weight
def cut_layers(costs, stages):
    n = len(costs)
    bounds = [n * i // stages for i in range(stages + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:])]
