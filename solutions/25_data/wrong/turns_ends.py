# 25.3: who is too early must not be asked at all
def turns(weights):
    total = sum(weights)
    had, order = [0] * len(weights), []
    for k in range(1, total + 1):
        ready = [i for i, weight in enumerate(weights) if weight]
        source = min(ready, key=lambda i: (had[i] + 1) / weights[i])
        had[source] += 1
        order.append(source)
    return order
