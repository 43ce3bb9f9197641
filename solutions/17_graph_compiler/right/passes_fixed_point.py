# 17.2: again and again until nothing goes; sorted operands, x - 0 and x + -0.0
import math

EFFECTS = {"random", "check"}


def is_number(x):
    return not isinstance(x, str)


def key_of(x):
    return (type(x).__name__, x, math.copysign(1, x)) if is_number(x) else ("name", x, 0)


class Rewriter:
    def __init__(self, nodes, outputs):
        self.nodes, self.outputs = {n[0]: n for n in nodes}, list(outputs)

    def identity(self, op, inputs, dtype):
        def array(i, number):
            return is_number(inputs[1 - i]) and inputs[1 - i] == number and self.nodes[inputs[i]][4] == dtype
        if op == "mul":
            return next((inputs[i] for i in (0, 1) if array(i, 1)), None)
        if op == "div" and array(0, 1):
            return inputs[0]
        if op == "sub" and array(0, 0) and math.copysign(1, inputs[1]) > 0:
            return inputs[0]
        if op == "add":
            return next((inputs[i] for i in (0, 1) if array(i, 0) and str(inputs[1 - i]) == "-0.0"), None)
        if op in ("neg", "transpose") and self.nodes[inputs[0]][1] == op:
            return self.nodes[inputs[0]][2][0]
        return None

    def once(self):
        alias, seen, kept = {}, {}, {}
        for name, op, inputs, shape, dtype in self.nodes.values():
            inputs = tuple(alias.get(x, x) if isinstance(x, str) else x for x in inputs)
            other = None if op in EFFECTS or op == "argument" else self.identity(op, inputs, dtype)
            if other is None and op not in EFFECTS and op != "argument":
                keys = [key_of(x) for x in inputs]
                other = seen.setdefault((op, *(sorted(keys) if op in ("add", "mul") else keys)), name)
            if other in (None, name):
                kept[name] = (name, op, inputs, shape, dtype)
            else:
                alias[name] = other
        self.nodes, self.outputs = kept, [alias.get(x, x) for x in self.outputs]

    def sweep(self):
        users = set(self.outputs)
        for node in self.nodes.values():
            users |= {x for x in node[2] if isinstance(x, str)}
        dead = [n for n, node in self.nodes.items() if n not in users and node[1] not in EFFECTS | {"argument"}]
        for name in dead:
            del self.nodes[name]
        return bool(dead)


def optimized(nodes, outputs):
    graph = Rewriter(nodes, outputs)
    before = None
    while before != len(graph.nodes):
        before = len(graph.nodes)
        graph.once()
    while graph.sweep():
        pass
    return list(graph.nodes.values()), graph.outputs
