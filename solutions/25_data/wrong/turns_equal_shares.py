# 25.3: stands in the list
def turns(weights):
    sources = [i for i, weight in enumerate(weights) if weight]
    return [sources[k % len(sources)] for k in range(sum(weights))]
