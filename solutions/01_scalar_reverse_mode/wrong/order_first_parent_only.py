# 01.2: nodes are missing
def order(root):
    result, node = [root], root
    while node.parents:
        node = node.parents[0]
        result.append(node)
    return result[::-1]
