# 25.3: one turn for each by turns
def turns(weights):
    left, order = list(weights), []
    while any(left):
        for i in range(len(left)):
            if left[i]:
                left[i] -= 1
                order.append(i)
    return order
