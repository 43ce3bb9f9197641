# 17.2: bool · True is still there
EFFECTS = ("random", "check")


def simpler(node, made):
    _, op, inputs, _, dtype = node
    if op == "mul" and not isinstance(inputs[0], str):
        inputs = inputs[::-1]
    if (op == "mul" or op == "div") and inputs[1] == 1 and type(inputs[1]) is not bool and made[inputs[0]][4] == dtype:
        return inputs[0]
    if op == "neg" or op == "transpose":
        x, = inputs
        _, before, sources, _, _ = made[x]
        if before == op:
            source, = sources
            return source
    return None


def simple(nodes, outputs):
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
    instead, first, kept = {}, {}, []
    for name, op, inputs, shape, dtype in nodes:
        inputs = tuple(instead.get(x, x) for x in inputs)
        key = op, tuple((type(x), repr(x)) for x in inputs)
        if op in (*EFFECTS, "argument"):
            key = name
        if key in first:
            instead[name] = first[key]
        else:
            first[key] = name
            kept.append((name, op, inputs, shape, dtype))
    return kept, [instead.get(name, name) for name in outputs]


def live(nodes, outputs):
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if node[0] in needed or node[1] in (*EFFECTS, "argument"):
            kept.append(node)
            needed.update(node[2])
    return kept[::-1], outputs


def optimized(nodes, outputs):
    for step in (simple, common, live):
        nodes, outputs = step(nodes, outputs)
    return nodes, outputs
