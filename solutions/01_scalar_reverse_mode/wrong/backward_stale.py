# 01.3: stale gradients: the first call is right, and the second adds

def backward(root, order):
    """Set node.grad to ∂root/∂node for root and every node that it was computed from.

    root   a Value: data, parents, local, grad (01.1)
    order  yours, of 01.2: order(root) lists the nodes, parents first

    What .grad held before is forgotten: a second call gives the same numbers.
    """
    nodes = order(root)
    root.grad += 1.0
    for node in reversed(nodes):
        for parent, slope in zip(node.parents, node.local, strict=True):
            parent.grad += slope * node.grad
