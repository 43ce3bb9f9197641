# 01.2: root itself is missing
def order(root):
    done, result, stack = set(), [], list(root.parents)
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
