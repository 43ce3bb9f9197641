# 17.4: the loop goes over a list of starts
EXPRESSIONS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "greater": "{0} > {1}",
    "neg": "-{0}", "exp": "np.exp({0})", "tanh": "np.tanh({0})", "sqrt": "np.sqrt({0})",
    "sum": "np.sum({0}, axis={1}, keepdims=True)", "max": "np.max({0}, axis={1}, keepdims=True)"}


def emit(nodes, outputs):
    by = {n[0]: n for n in nodes}
    arguments = [n for n in nodes if n[1] == "argument"]
    rows = by[outputs[0]][3][0]
    lines = ["def kernel(arguments, results, tile):",
             f"    for begin in [tile * i for i in range(-(-{rows} // tile))]:",
             f"        here = slice(begin, min(begin + tile, {rows}))"]
    for at, (name, _, _, shape, _) in enumerate(arguments):
        cut = "[here]" if len(shape) == 2 and shape[0] == rows and rows != 1 else ""
        lines.append(f"        {name} = arguments[{at}]{cut}")
    for name, op, inputs, _, _ in nodes:
        if op != "argument":
            words = [i if isinstance(i, str) else repr(i) for i in inputs]
            lines.append(f"        {name} = " + EXPRESSIONS[op].format(*words))
    for at, name in enumerate(outputs):
        lines.append(f"        results[{at}][here] = {name}")
    return "\n".join(lines) + "\n"
