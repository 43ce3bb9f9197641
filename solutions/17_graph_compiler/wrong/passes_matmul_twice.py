# 17.2: is still done twice
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
    # begin with the op, and with what its operands are: names or numbers. A 1 is a 1, whether int, float or True, but
    # bool · 1 is an int64
    _, op, inputs, _, dtype = node
    if op == "mul" and not isinstance(inputs[0], str):
        inputs = inputs[::-1]
    if (op == "mul" or op == "div") and inputs[1] == 1 and made[inputs[0]][4] == dtype:
        return inputs[0]
    if op == "neg" or op == "transpose":
        x, = inputs
        _, before, sources, _, _ = made[x]
        if before == op:
            source, = sources
            return source
    return None


def simple(nodes, outputs):
    """Without the ops that change nothing."""
    # begin with a dict, name of what is left out: name of what stands for it
    instead, made = {}, {}
    for name, op, inputs, shape, dtype in nodes:
        node = name, op, tuple(instead.get(x, x) for x in inputs), shape, dtype
        same = simpler(node, made)
        if same is None:
            made[name] = node
        else:
            instead[name] = same
    return list(made.values()), [instead.get(name, name) for name in outputs]


def common(nodes, outputs):
    """Each op done once on the same inputs."""
    # begin with a dict, what an op does: the name of its result. What makes two of them the same? And no others?
    instead, first, kept = {}, {}, []
    for name, op, inputs, shape, dtype in nodes:
        inputs = tuple(instead.get(x, x) for x in inputs)
        key = op, tuple((type(x), repr(x)) for x in inputs)
        if op in (*EFFECTS, "argument", "matmul"):
            key = name
        if key in first:
            instead[name] = first[key]
        else:
            first[key] = name
            kept.append((name, op, inputs, shape, dtype))
    return kept, [instead.get(name, name) for name in outputs]


def live(nodes, outputs):
    """Without the ops whose results nobody needs. Arguments stay."""
    # begin with the outputs: they are needed. Who else is, shows on the way up
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if node[0] in needed or node[1] in (*EFFECTS, "argument"):
            kept.append(node)
            needed.update(node[2])
    return kept[::-1], outputs


def optimized(nodes, outputs):
    """(nodes, outputs) after all passes. Outputs may have other names than before; nodes keep those that they have."""
    # begin with an order of the passes in which each finds what the one before has left for it
    for step in (simple, common, live):
        nodes, outputs = step(nodes, outputs)
    return nodes, outputs
