# 01.2: the graph is changed
def order(root):
    done, result, stack = set(), [], [root]
    while stack:
        node = stack[-1]
        if node.parents:
            parent, node.parents = node.parents[0], node.parents[1:]
            if parent not in done:
                stack.append(parent)
        else:
            stack.pop()
            if node not in done:
                done.add(node)
                result.append(node)
    return result
