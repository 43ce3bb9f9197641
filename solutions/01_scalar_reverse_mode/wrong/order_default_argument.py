# 01.2: a second call with the same root gives another list
def order(root, done=set()):
    result, stack = [], [root]
    while stack:
        node = stack[-1]
        missing = [parent for parent in node.parents if parent not in done]
        if missing:
            stack += missing
        else:
            stack.pop()
            if node not in done:
                done.add(node)
                result.append(node)
    return result
