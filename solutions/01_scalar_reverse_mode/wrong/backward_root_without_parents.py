# 01.3: a root without parents keeps the gradient 0
def backward(root, order):
    nodes = order(root)
    for node in nodes:
        node.grad = 0.0
    root.grad = 1.0 if root.parents else 0.0
    for node in reversed(nodes):
        for parent, slope in zip(node.parents, node.local, strict=True):
            parent.grad += slope * node.grad
