# 25.3: the weights aren't what they were
def turns(weights):
    order = []
    while any(weights):
        for i in range(len(weights)):
            if weights[i]:
                weights[i] -= 1
                order.append(i)
    return order
