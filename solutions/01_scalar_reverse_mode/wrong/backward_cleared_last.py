# 01.3: every .grad is still 0
def backward(root, order):
    nodes = order(root)
    root.grad = 1.0
    for node in nodes:
        node.grad = 0.0
    for node in reversed(nodes):
        for parent, local in zip(node.parents, node.local, strict=True):
            parent.grad += local * node.grad
