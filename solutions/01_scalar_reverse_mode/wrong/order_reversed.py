# 01.2: the list begins with root: it is the other way round
def order(root):
    done, result, stack = set(), [], [root]
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
    return result[::-1]
