# 01.3: root's own .grad isn't set to 0
def backward(root, order):
    nodes = order(root)
    for node in nodes[:-1]:
        node.grad = 0.0
    root.grad += 1.0
    for node in reversed(nodes):
        for parent, slope in zip(node.parents, node.local, strict=True):
            parent.grad += slope * node.grad
