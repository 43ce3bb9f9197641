# 01.2: by recursion, with Python's limit raised
import sys


def order(root):
    sys.setrecursionlimit(1_000_000)
    found, seen = [], set()

    def visit(node):
        if node not in seen:
            seen.add(node)
            for parent in node.parents:
                visit(parent)
            found.append(node)
    visit(root)
    return found
