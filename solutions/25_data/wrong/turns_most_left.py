# 25.3: That is who has most turns left
def turns(weights):
    left, order = list(weights), []
    for _ in range(sum(weights)):
        i = max(range(len(left)), key=left.__getitem__)
        left[i] -= 1
        order.append(i)
    return order
