# 01.3: set to 0 during the walk
def backward(root, order):
    root.grad = 1.0
    for node in reversed(order(root)):
        for parent in node.parents:
            parent.grad = 0.0
        for parent, local in zip(node.parents, node.local, strict=True):
            parent.grad += local * node.grad
