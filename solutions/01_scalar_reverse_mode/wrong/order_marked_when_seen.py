# 01.2: a node comes before one of its parents
def order(root):
    seen, result, queue = {root}, [], [root]
    while queue:
        node = queue.pop(0)
        result.append(node)
        for parent in node.parents:
            if parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return result[::-1]
