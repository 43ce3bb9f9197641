# 25.3: where less than 1 was asked for
def turns(weights):
    late, order, total = [0] * len(weights), [], sum(weights)
    for _ in range(total):
        i = max((i for i in range(len(late)) if weights[i]), key=lambda i: late[i])
        late = [a + b for a, b in zip(late, weights)]
        late[i] -= total
        order.append(i)
    return order
