"""01.2 In which order?

A node may pass its gradient on only when it is complete: when every node that was computed from it has had its turn.
An order in which parents come before what was made of them, read backwards, guarantees just that.
"""


def order(root):
    """All nodes that root was computed from, and root: each once, every parent before the nodes made from it.

    root    a node; node.parents are the nodes that it was made from
    Returns a list of nodes. Chains of ten thousand operations are usual, and Python's recursion ends at a thousand.
    """
    # begin with a stack, a plain list: a node is put into the result when all its parents are there already
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
    return result
