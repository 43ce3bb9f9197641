# 25.3: That is who has had the least of its weight
def turns(weights):
    had, order = [0] * len(weights), []
    for _ in range(sum(weights)):
        i = min((i for i in range(len(weights)) if weights[i]), key=lambda i: had[i] / weights[i])
        had[i] += 1
        order.append(i)
    return order
