# 01.3: is handed one number only: a dict or a set of the parents
def backward(root, order):
    nodes = order(root)
    for node in nodes:
        node.grad = 0.0
    root.grad = 1.0
    for node in nodes[::-1]:
        for parent, slope in dict(zip(node.parents, node.local, strict=True)).items():
            parent.grad += slope * node.grad
