# 01.3: a node with the gradient 0 ends the walk
def backward(root, order):
    nodes = order(root)
    for node in nodes:
        node.grad = 0.0
    root.grad = 1.0
    for node in reversed(nodes):
        if node.grad == 0.0:
            break
        for parent, slope in zip(node.parents, node.local, strict=True):
            parent.grad += slope * node.grad
