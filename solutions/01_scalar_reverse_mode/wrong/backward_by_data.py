# 01.3: two nodes that hold the same number share one gradient
def backward(root, order):
    nodes = order(root)
    found = {node.data: 0.0 for node in nodes}
    found[root.data] = 1.0
    for node in reversed(nodes):
        for parent, slope in zip(node.parents, node.local, strict=True):
            found[parent.data] += slope * found[node.data]
    for node in nodes:
        node.grad = found[node.data]
