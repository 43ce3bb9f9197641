# 25.3: stands in the list
def turns(weights):
    total = sum(weights)
    had, order = [0] * len(weights), []
    for k in range(1, total + 1):
        ready = [i for i, weight in enumerate(weights) if had[i] * total < k * weight]
        source = min(ready, key=lambda i: -(-(had[i] + 1) * total // weights[i]))
        had[source] += 1
        order.append([i for i, weight in enumerate(weights) if weight].index(source))
    return order
