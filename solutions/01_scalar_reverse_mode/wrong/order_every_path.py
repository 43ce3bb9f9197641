# 01.2: no answer within
def order(root):
    result, queue = [], [root]
    while queue:
        node = queue.pop(0)
        if node in result:
            result.remove(node)
        result.append(node)
        queue += node.parents
    return result[::-1]
