# 01.3: stale gradients: backward of another result
def backward(root, order):
    nodes = order(root)
    if root.grad:       # then there was a backward before
        for node in nodes:
            node.grad = 0.0
    root.grad = 1.0
    for node in reversed(nodes):
        for parent, slope in zip(node.parents, node.local, strict=True):
            parent.grad += slope * node.grad
