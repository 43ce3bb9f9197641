# 01.3: each node asks those that it was used by
def backward(root, order):
    nodes = order(root)
    children = {node: [] for node in nodes}
    for node in nodes:
        for parent, slope in zip(node.parents, node.local, strict=True):
            children[parent].append((node, slope))
    root.grad = 1
    for node in nodes[-2::-1]:
        node.grad = sum(slope * child.grad for child, slope in children[node])
