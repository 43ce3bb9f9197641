"""01.3 Backward.

The chain rule, read from the result to the leaves: what a node receives is multiplied by its local derivatives and
handed to its parents, who add up what they are handed.
"""


def backward(root, order):
    """Set node.grad to ∂root/∂node for root and every node that it was computed from.

    root   a Value: data, parents, local, grad (01.1)
    order  yours, of 01.2: order(root) lists the nodes, parents first

    What .grad held before is forgotten: a second call gives the same numbers.
    """
    raise NotImplementedError("begin with the gradient of root by itself, and with all other gradients at 0; then "
                              "walk the order backwards")
