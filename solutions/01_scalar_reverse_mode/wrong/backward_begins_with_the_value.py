# 01.3: root's gradient by itself is 1
def backward(root, order):
    nodes = order(root)
    for node in nodes:
        node.grad = 0.0
    root.grad = root.data
    for node in reversed(nodes):
        for parent, slope in zip(node.parents, node.local, strict=True):
            parent.grad += slope * node.grad
