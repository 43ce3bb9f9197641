# 17.2: x - 0.0 is x, bit for bit
EFFECTS = ("random", "check")


def simpler(node, made):
    name, op, inputs, shape, dtype = node
    def is_one(x):
        return not isinstance(x, str) and x == 1
    def fits(x):
        return isinstance(x, str) and made[x][4] == dtype and tuple(made[x][3]) == tuple(shape)
    if op == "mul":
        a, b = inputs
        if is_one(b) and fits(a):
            return a
        if is_one(a) and fits(b):
            return b
    if op == "div" and is_one(inputs[1]) and fits(inputs[0]):
        return inputs[0]
    if op in ("neg", "transpose"):
        inner = made[inputs[0]]
        if inner[1] == op:
            return inner[2][0]
    if op == "sub" and not isinstance(inputs[1], str) and str(float(inputs[1])) == "0.0" and fits(inputs[0]):
        return inputs[0]
    return None


def simple(nodes, outputs):
    stands, made, kept = {}, {}, []
    for name, op, inputs, shape, dtype in nodes:
        inputs = tuple(stands.get(i, i) if isinstance(i, str) else i for i in inputs)
        node = (name, op, inputs, shape, dtype)
        other = simpler(node, made) if op not in ("argument", *EFFECTS) else None
        if other is not None:
            stands[name] = other
        else:
            made[name] = node
            kept.append(node)
    return kept, [stands.get(o, o) for o in outputs]


def common(nodes, outputs):
    stands, seen, kept = {}, {}, []
    for name, op, inputs, shape, dtype in nodes:
        inputs = tuple(stands.get(i, i) if isinstance(i, str) else i for i in inputs)
        if op not in ("argument", *EFFECTS):
            key = op, tuple((type(i).__name__, repr(i)) for i in inputs), tuple(shape), dtype
            if key in seen:
                stands[name] = seen[key]
                continue
            seen[key] = name
        kept.append((name, op, inputs, shape, dtype))
    return kept, [stands.get(o, o) for o in outputs]


def live(nodes, outputs):
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        name, op, inputs, _, _ = node
        if name in needed or op in EFFECTS or op == "argument":
            needed |= {i for i in inputs if isinstance(i, str)}
            kept.append(node)
    return kept[::-1], list(outputs)


def optimized(nodes, outputs):
    return live(*common(*simple(nodes, outputs)))
