# 01.2: the nodes come as a generator, a set
def order(root):
    found, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.parents)
    return found
