# 01.3: a node hands on its .data
def backward(root, order):
    nodes = order(root)
    for node in nodes:
        node.grad = 0.0
    root.grad = 1.0
    for node in reversed(nodes):
        for parent, local in zip(node.parents, node.local, strict=True):
            parent.grad += local * node.data
