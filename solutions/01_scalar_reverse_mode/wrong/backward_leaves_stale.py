# 01.3: not all are set to 0 before it
def backward(root, order):
    nodes = order(root)
    for node in nodes:
        if node.parents:
            node.grad = 0.0
    root.grad = 1.0
    for node in reversed(nodes):
        for parent, slope in zip(node.parents, node.local, strict=True):
            parent.grad += slope * node.grad
