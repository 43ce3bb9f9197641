# 25.3: two calls give two orders
had = {}


def turns(weights):
    order = []
    start = had.setdefault(len(weights), 0)
    had[len(weights)] += 1
    names = [i for i, weight in enumerate(weights) if weight]
    for i in names[start % len(names):] + names[:start % len(names)]:
        order += [i] * weights[i]
    return order
