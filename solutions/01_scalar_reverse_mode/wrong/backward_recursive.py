# 01.3: no answer within
def backward(root, order):
    for node in order(root):
        node.grad = 0.0

    def hand_down(node, handed):
        node.grad += handed
        for parent, slope in zip(node.parents, node.local, strict=True):
            hand_down(parent, slope * handed)
    hand_down(root, 1.0)
