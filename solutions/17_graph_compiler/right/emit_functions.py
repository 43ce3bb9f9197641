# 17.4: NumPy's functions, a while loop
FUNCTIONS = {"add": "np.add", "sub": "np.subtract", "mul": "np.multiply", "div": "np.true_divide",
             "greater": "np.greater", "neg": "np.negative", "exp": "np.exp", "tanh": "np.tanh", "sqrt": "np.sqrt"}


def emit(nodes, outputs):
    rows = {name: shape for name, _, _, shape, _ in nodes}[outputs[0]][0]
    text = f"""def kernel(arguments, results, tile):
  first = 0
  while first < {rows}:
    last = min(first + tile, {rows})
"""
    arguments = [node for node in nodes if node[1] == "argument"]
    for number, (name, _, _, shape, _) in enumerate(arguments):
        rowwise = len(shape) > 1 and shape[-2] == rows
        text += f"    {name} = arguments[{number}]{'[first:last]' if rowwise else ''}\n"
    for name, op, inputs, _, _ in nodes:
        if op in FUNCTIONS:
            text += f"    {name} = {FUNCTIONS[op]}({', '.join(map(str, inputs))})\n"
        elif op != "argument":
            text += f"    {name} = np.{op}({inputs[0]}, {inputs[1]}, keepdims=True)\n"
    for number, name in enumerate(outputs):
        text += f"    np.copyto(results[{number}][first:last], {name})\n"
    return text + "    first = last\n"
