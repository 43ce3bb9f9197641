# 17.4: of an output that is given twice
EXPRESSIONS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "greater": "{0} > {1}",
    "neg": "-{0}", "exp": "np.exp({0})", "tanh": "np.tanh({0})", "sqrt": "np.sqrt({0})",
    "sum": "np.sum({0}, axis={1}, keepdims=True)", "max": "np.max({0}, axis={1}, keepdims=True)"}


def emit(nodes, outputs):
    shapes = {node[0]: node[3] for node in nodes}
    rows, given = shapes[outputs[0]][0], 0
    lines = ["def kernel(arguments, results, tile):", f"    for top in range(0, {rows}, tile):",
             "        here = slice(top, top + tile)"]
    for name, op, inputs, shape, _ in nodes:
        if op == "argument":
            by_row = len(shape) == 2 and shape[0] == rows
            lines.append(f"        {name} = arguments[{given}]" + "[here]" * by_row)
            given += 1
        else:
            lines.append(f"        {name} = " + EXPRESSIONS[op].format(*inputs))
    lines += [f"        results[{k}][here] = {name}" for name, k in {name: k for k, name in enumerate(outputs)}.items()]
    return "\n".join(lines)
