# 01.2: a node is there more than once
def order(root):
    done, result, stack = set(), [], [root]
    while stack:
        node = stack[-1]
        missing = [parent for parent in node.parents if parent not in done]
        if missing:
            stack += missing
        else:
            stack.pop()
            done.add(node)
            result.append(node)
    return result
