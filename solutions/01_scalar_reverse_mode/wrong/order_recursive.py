# 01.2: RecursionError
def order(root):
    done, result = set(), []

    def visit(node):
        if node not in done:
            done.add(node)
            for parent in node.parents:
                visit(parent)
            result.append(node)
    visit(root)
    return result
