# 17.3: in “other widths, a maximum” p, q are one loop
"""17.3 Which ops become one loop.

One op after the other, each reads its operands from memory and writes its result there. A kernel is a loop over rows
which does several ops while a row is in the cache: it reads what comes from outside, and writes what others need.

All arrays here are matrices, (rows, columns), and axes are 0 or 1. An op walks over its result, a sum or max over its
operand.
"""

from math import prod

ALONE = ("matmul", "transpose", "random", "check")      # each a kernel of its own


def one_loop(kernel, nodes):
    """Whether the ops with these names, in this order, can be done in one loop over rows.

    - an op that stands alone, does
    - all walk over the same number of rows. Of columns too, but for those that walk over one column: a number per row
    - a sum or max over axis 1 is ready at the end of a row, and the row's elements may use it (softmax does). One over
      axis 0 is ready at the end of the loop: it can be in the kernel, but nothing in the kernel may use it
    """
    # begin with {name: node}, and for each op the (rows, columns) that it walks over
    made = {node[0]: node for node in nodes}
    walks, late = [], set()
    for name in kernel:
        _, op, inputs, shape, _ = made[name]
        if op in ALONE:
            return len(kernel) == 1
        if late.intersection(inputs):
            return False
        reduction = op in ("sum", "max")
        walks.append(made[inputs[0]][3] if op == "sum" else shape)
        if reduction and inputs[1] == 0:
            late.add(name)
    return len({rows for rows, _ in walks}) == 1 and len({columns for _, columns in walks} - {1}) <= 1


def ordered(kernels, nodes):
    """The kernels in an order in which each comes after those that it needs; None if some wait for each other.

    nodes may have ops that are in no kernel yet; no op in a kernel needs one of them.
    """
    # begin with what is there before any kernel: the arguments. Then a kernel that needs no more than what is there
    inputs = {node[0]: {x for x in node[2] if isinstance(x, str)} for node in nodes}
    there, order, waiting = {node[0] for node in nodes if node[1] == "argument"}, [], list(kernels)
    while waiting:
        ready = [k for k in waiting if all(inputs[name] <= there.union(k) for name in k)]
        if not ready:
            return None
        order.append(ready[0])
        waiting.remove(ready[0])
        there.update(ready[0])
    return order


def fused(nodes):
    """The kernels, a list of lists of names, in an order to run them in. Each op is in just one; arguments in none.

    Greedy: an op joins a kernel in which it can be, whether or not that makes what the op needs; else it begins one.
    """
    # begin with the ops in order. Try each kernel with the op in it: is that still one loop, and have all kernels still
    # an order?
    kernels = []
    for name, op, *_ in nodes:
        if op == "argument":
            continue
        for i, kernel in enumerate(kernels):
            trial = [*kernels[:i], [*kernel, name], *kernels[i + 1:]]
            if one_loop(trial[i], nodes) and ordered(trial, nodes):
                kernels = trial
                break
        else:
            kernels.append([name])
    return ordered(kernels, nodes)


def bytes_moved(nodes, outputs, kernels):
    """Bytes that the kernels read and write. A kernel reads each array from outside once, in the array's own size, and
    writes those of its results that another kernel needs or that are outputs.

    dtypes are "float32", "float64" and "bool": 4, 8 and 1 bytes for an element.
    """
    # begin with the bytes of each array, by name. Then per kernel two sets of names: what it reads, what it writes
    size = {name: prod(shape) * {"float32": 4, "float64": 8, "bool": 1}[dtype] for name, _, _, shape, dtype in nodes}
    inputs = {node[0]: {x for x in node[2] if isinstance(x, str)} for node in nodes}
    read = [set().union(*(inputs[name] for name in kernel)) - set(kernel) for kernel in kernels]
    needed = set(outputs).union(*read)
    return sum(size[name] for names, kernel in zip(read, kernels, strict=True)
               for name in [*names, *needed.intersection(kernel)])
