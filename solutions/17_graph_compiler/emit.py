"""17.4 A kernel as a program.

The compiler's last step writes a program: text. Ours is Python, a loop over tiles of a few rows each, which do all ops
on a tile while it is in the cache, and keep nothing in between that is larger than a tile.
"""

EXPRESSIONS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "greater": "{0} > {1}",
    "neg": "-{0}", "exp": "np.exp({0})", "tanh": "np.tanh({0})", "sqrt": "np.sqrt({0})",
    "sum": "np.sum({0}, axis={1}, keepdims=True)", "max": "np.max({0}, axis={1}, keepdims=True)"}


def emit(nodes, outputs):
    """The source of a function kernel(arguments, results, tile), in which `np` is NumPy.

    nodes, outputs  a kernel by itself: first its arguments; then ops on rows, elementwise or over axis 1. All outputs
                    are matrices of the same number of rows, over which the loop goes. Arguments may have other shapes
                    that broadcast, like (columns,), (1, columns), (rows, 1) and ()
    arguments       list of arrays, one per argument; they aren't changed
    results         list of arrays, one per output, which the function fills
    tile            how many rows are done at a time; the number of rows need not be a multiple of it

    An array that broadcasts over the rows is used whole for every tile. Names of nodes are Python names other than
    these three, `np` and `here`. Numbers are finite: the text of an infinity, inf, is a name in Python.
    """
    # begin with the number of rows, and the three lines that every kernel has: def, for, and here = slice(…), the rows
    # of the tile. Then a line per argument, per op, and per output
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
    lines += [f"        results[{k}][here] = {name}" for k, name in enumerate(outputs)]
    return "\n".join(lines)
