# 25.3: That is one source after the other
def turns(weights):
    order = []
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        order += [i] * weights[i]
    return order
