# 25.3: were asked for, the sum of the weights
def turns(weights):
    return [i for _ in range(max(weights)) for i, weight in enumerate(weights) if weight]
