# 01.2: counted from root on: a node is ready when all that used it are done
from collections import Counter, deque


def order(root):
    nodes, stack, uses = {root}, [root], Counter()
    while stack:
        for parent in stack.pop().parents:
            uses[parent] += 1
            if parent not in nodes:
                nodes.add(parent)
                stack.append(parent)
    ready, found = deque([root]), []
    while ready:
        node = ready.popleft()
        found.append(node)
        for parent in node.parents:
            uses[parent] -= 1
            if not uses[parent]:
                ready.append(parent)
    return found[::-1]
