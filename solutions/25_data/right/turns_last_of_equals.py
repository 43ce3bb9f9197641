# 25.3: of equals the last, and the exact time in place of its place
from fractions import Fraction


def turns(weights):
    total = sum(weights)
    had, order = [0] * len(weights), []
    for k in range(1, total + 1):
        ready = [i for i, weight in enumerate(weights) if had[i] * total < k * weight]
        source = min(reversed(ready), key=lambda i: Fraction((had[i] + 1) * total, weights[i]))
        had[source] += 1
        order.append(source)
    return order
