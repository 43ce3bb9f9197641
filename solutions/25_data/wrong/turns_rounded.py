# 25.3: where less than 1 was asked for
def turns(weights):
    total = sum(weights)
    had, order = [0] * len(weights), []
    for k in range(1, total + 1):
        i = max((i for i in range(len(weights)) if had[i] < weights[i]), key=lambda i: (round(k * weights[i] / total) - had[i], weights[i]))
        had[i] += 1
        order.append(i)
    return order
