"""What C and Triton share of writing a kernel: how inputs are walked over, and which value is known when.

    for each row:                                   rows are independent; sums over rows go on from row to row
        numbers of the row that are known before    (scalars)
        for each column: …                          loop 0: what needs no sum over this row
        sums of loop 0 and what is made of them     (scalars)
        for each column: …                          loop 1: what needs those
        …
"""

from .expressions import REDUCTIONS
from .fusion import COLUMN, FULL, ROW, SCALAR, shape_of, split
from .rules import count


class Walk:
    """A kernel for inputs with certain strides (in elements), one tuple per input.

    nodes    {value: its node}
    names    {value: its name in the source}
    pairs    the inputs as they are used: (value, shape of the user), each once
    loop_of  {FULL value: the loop in which it is computed}
    after    {ROW value: how many loops come before it}
    """

    def __init__(self, kernel, strides):
        self.kernel, self.roles = kernel, kernel.roles
        self.strides = dict(zip(kernel.inputs, strides, strict=True))
        self.inputs = list(kernel.inputs)
        self.nodes = {node.result: node for node in kernel.nodes}
        self.names = {v: f"v{i}" for i, v in enumerate(self.nodes)}
        self.pairs = list(dict.fromkeys((v, shape_of(node)) for node in kernel.nodes for v in node.inputs
                                        if v not in kernel.roles))
        self.loop_of, self.after = {}, {}
        for v, node in self.nodes.items():
            if self.roles[v] == FULL:
                self.loop_of[v] = self.time(node)
            elif self.roles[v] == ROW:
                self.after[v] = self.time(node) + (node.name in REDUCTIONS)

    def time(self, node):
        """The first loop in which, or the number of loops behind which, all inputs of a node are known."""
        return max((self.loop_of.get(v, self.after.get(v, 0)) for v in node.inputs), default=0)

    @property
    def loops(self):
        """How many loops over the columns there are."""
        return 1 + max((*self.loop_of.values(), *(n - 1 for n in self.after.values()), *(
            self.time(node) for v, node in self.nodes.items() if self.roles[v] in (COLUMN, SCALAR))), default=0)

    def reduced_in(self, number):
        """[(result, its node)] of the sums and maxima over what loop `number` computes."""
        found = []
        for v, node in self.nodes.items():
            role = self.roles[v]
            if role == ROW and node.name in REDUCTIONS and self.after[v] == number + 1 or role in (COLUMN, SCALAR) \
                    and self.time(node) == number and self.roles.get(node.inputs[0]) != ROW:
                found.append((v, node))
        return found

    def dims(self, v, shape):
        """How an input is walked over: ([(extent, stride)] over the rows, the same over the columns)."""
        strides = (0,) * (len(shape) - len(v.shape)) + tuple(
            0 if extent == 1 else stride for extent, stride in zip(v.shape, self.strides[v], strict=True))
        k = split(shape, self.kernel.columns) if count(shape) == self.kernel.size else 0
        dims = list(zip(shape, strides, strict=True))
        return dims[:len(dims) - k], dims[len(dims) - k:]


def place(index, dims, divide="/", suffix=""):
    """The offset of element number `index`, counted through axes [(extent, stride)], as source; "" where it is 0."""
    merged = []
    for extent, stride in reversed(dims):
        if extent == 1:
            continue
        if merged and stride == merged[-1][1] * merged[-1][0]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, stride))
    terms, inner = [], 1
    for i, (extent, stride) in enumerate(merged):
        at = index if inner == 1 else f"({index} {divide} {inner})"
        at = at if i == len(merged) - 1 else f"({at} % {extent})"
        if stride:
            terms.append(at if stride == 1 else f"{at} * {stride}{suffix}")
        inner *= extent
    return " + ".join(terms)
