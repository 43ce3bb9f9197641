# 01.2: the nodes without parents are missing
def order(root):
    found, seen, stack = [], set(), [(root, False)]
    while stack:
        node, complete = stack.pop()
        if not node.parents:
            continue
        if complete:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(parent, False) for parent in node.parents]
    return found
