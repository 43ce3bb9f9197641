# 25.3: two calls give two orders
import random


def turns(weights):
    total = sum(weights)
    had, order = [0] * len(weights), []
    for k in range(1, total + 1):
        ready = [i for i, weight in enumerate(weights) if had[i] * total < k * weight]
        latest = [-(-(had[i] + 1) * total // weights[i]) for i in ready]
        source = random.choice([i for i, late in zip(ready, latest) if late == min(latest)])
        had[source] += 1
        order.append(source)
    return order
