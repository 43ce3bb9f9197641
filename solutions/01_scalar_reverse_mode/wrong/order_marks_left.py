# 01.2: a second call with the same root gives another list
def order(root):
    result, stack = [], [root]
    while stack:
        node = stack[-1]
        missing = [p for p in node.parents if not hasattr(p, "done")]
        if missing:
            stack += missing
        else:
            stack.pop()
            if not hasattr(node, "done"):
                node.done = True
                result.append(node)
    return result
