# 01.3: not what backward returns
def backward(root, order):
    grads = {root: 1.0}
    for node in reversed(order(root)):
        for parent, local in zip(node.parents, node.local, strict=True):
            grads[parent] = grads.get(parent, 0.0) + local * grads[node]
    return grads
