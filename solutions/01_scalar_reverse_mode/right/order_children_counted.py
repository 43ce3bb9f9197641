# 01.2: from the root down, a node when all made from it are there; turned round at the end, a tuple
from collections import Counter


def order(root):
    waits, seen, todo = Counter(), {root}, [root]
    while todo:
        for parent in todo.pop().parents:
            waits[parent] += 1
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
    found, ready = [], [root]
    while ready:
        found.append(ready.pop())
        for parent in found[-1].parents:
            waits[parent] -= 1
            if not waits[parent]:
                ready.append(parent)
    return tuple(reversed(found))
