# 01.2: by recursion, with Python's limit raised
import sys


def order(root):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    found, seen = [], set()

    def visit(node):
        if node not in seen:
            seen.add(node)
            for parent in node.parents:
                visit(parent)
            found.append(node)
    try:
        visit(root)
    finally:
        sys.setrecursionlimit(limit)
    return found
