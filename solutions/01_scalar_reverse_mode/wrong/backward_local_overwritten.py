# 01.3: a later one isn't: it found the graph changed
def backward(root, order):
    nodes = order(root)
    for node in nodes:
        node.grad = 0.0
    root.grad = 1.0
    for node in reversed(nodes):
        node.local = tuple(s * node.grad for s in node.local)
        for parent, slope in zip(node.parents, node.local, strict=True):
            parent.grad += slope
