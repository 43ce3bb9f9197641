"""17.2 The same with less.

A pass takes a graph and gives one that computes the same, to the last bit, with fewer ops. Three of them:

    simple   an op that changes nothing is left out: x·1, 1·x, x/1, −(−x), the transpose of a transpose
    common   an op that was done already, on the same inputs, isn't done again
    live     an op whose result nobody needs isn't done at all

Nodes are (name, op, inputs, shape, dtype), as 17.1 makes them. There are two ops more, which do something beside giving
a result, so that each of them must stay, and stay one: "random" draws new numbers, in the order of the nodes, and
"check" stops the program if its input isn't finite; nobody uses its result.
"""

EFFECTS = ("random", "check")


def simpler(node, made):
    """The name of an earlier value that is the node's result, bit for bit and in its dtype; None where there is none.

    made  {name: node} of all nodes before
    """
    raise NotImplementedError("begin with the op, and with what its operands are: names or numbers. A 1 is a 1, "
                              "whether int, float or True, but bool · 1 is an int64")


def simple(nodes, outputs):
    """Without the ops that change nothing."""
    raise NotImplementedError("begin with a dict, name of what is left out: name of what stands for it")


def common(nodes, outputs):
    """Each op done once on the same inputs."""
    raise NotImplementedError("begin with a dict, what an op does: the name of its result. What makes two of them the"
                              " same? And no others?")


def live(nodes, outputs):
    """Without the ops whose results nobody needs. Arguments stay."""
    raise NotImplementedError("begin with the outputs: they are needed. Who else is, shows on the way up")


def optimized(nodes, outputs):
    """(nodes, outputs) after all passes. Outputs may have other names than before; nodes keep those that they have."""
    raise NotImplementedError("begin with an order of the passes in which each finds what the one before has left for"
                              " it")
