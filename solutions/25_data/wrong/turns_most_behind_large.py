# 25.3: where less than 1 was asked for
def turns(weights):
    late, order, total = [0] * len(weights), [], sum(weights)
    for _ in range(total):
        late = [a + b for a, b in zip(late, weights)]
        i = max(range(len(late)), key=lambda i: (late[i], weights[i]))
        late[i] -= total
        order.append(i)
    return order
