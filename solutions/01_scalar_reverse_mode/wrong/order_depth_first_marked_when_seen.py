# 01.2: a node comes before one of its parents
def order(root):
    seen, result, stack = {root}, [], [root]
    while stack:
        node = stack.pop()
        result.append(node)
        for parent in node.parents:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return result[::-1]
