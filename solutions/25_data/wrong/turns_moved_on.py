# 25.3: moved on where one is
def turns(weights):
    total = sum(weights)
    order = [None] * total
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        for j in range(weights[i]):
            at = j * total // weights[i]
            while order[at % total] is not None:
                at += 1
            order[at % total] = i
    return order
