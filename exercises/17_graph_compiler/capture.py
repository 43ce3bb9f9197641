"""17.1 A function run on nothing.

A compiler needs to know what a function does before it does it. So the function is called with arguments that have a
shape and a dtype but no elements. Whatever it does with one is written down, and gives another one.
"""

import numpy as np

ELEMENTWISE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "greater": np.greater,
               "neg": np.negative, "exp": np.exp, "tanh": np.tanh, "sqrt": np.sqrt}
OPS = ELEMENTWISE | {
    "matmul": np.matmul, "transpose": np.transpose,
    "sum": lambda x, axis: np.sum(x, axis=axis, keepdims=True),
    "max": lambda x, axis: np.max(x, axis=axis, keepdims=True)}


class Break(Exception):
    """The function asked for a value, by `asked` ("bool", "float" …), of what the op `op` will give."""

    def __init__(self, asked, op):
        super().__init__(f"{asked}() of what {op} gives: while a function is captured there are no values")
        self.asked, self.op = asked, op


class Tape:
    """What has been written down so far.

    nodes   [(name, op, inputs, shape, dtype)]: plain data. inputs is a tuple of names (strings), and of numbers; the
            last one of a sum or max is the axis. An argument of the function has the op "argument", and no inputs
    breaks  [Break], all that there were, in order
    """

    def __init__(self):
        self.nodes, self.breaks = [], []

    def append(self, op, inputs, shape, dtype):
        """One more node; its Symbol."""
        name = f"v{len(self.nodes)}"
        self.nodes.append((name, op, tuple(inputs), tuple(shape), str(dtype)))
        return Symbol(self, name, tuple(shape), str(dtype))


class Symbol:
    """What will be an array: `name` of its node on `tape`, `shape` (a tuple), `dtype` ("float32", …)."""

    __array_ufunc__ = None      # so that NumPy leaves number * symbol to __rmul__
    __hash__ = object.__hash__

    def __init__(self, tape, name, shape, dtype):
        self.tape, self.name, self.shape, self.dtype = tape, name, shape, dtype

    __add__ = lambda self, other: record("add", self, other)
    __radd__ = lambda self, other: record("add", other, self)
    __sub__ = lambda self, other: record("sub", self, other)
    __rsub__ = lambda self, other: record("sub", other, self)
    __mul__ = lambda self, other: record("mul", self, other)
    __rmul__ = lambda self, other: record("mul", other, self)
    __truediv__ = lambda self, other: record("div", self, other)
    __rtruediv__ = lambda self, other: record("div", other, self)
    __matmul__ = lambda self, other: record("matmul", self, other)
    __gt__ = lambda self, other: record("greater", self, other)
    __lt__ = lambda self, other: record("greater", other, self)
    __neg__ = lambda self: record("neg", self)
    exp = lambda self: record("exp", self)
    tanh = lambda self: record("tanh", self)
    sqrt = lambda self: record("sqrt", self)
    sum = lambda self, axis: record("sum", self, axis)      # the axis stays, with one element
    max = lambda self, axis: record("max", self, axis)
    T = property(lambda self: record("transpose", self))

    __bool__ = lambda self: self.refuse("bool")
    __float__ = lambda self: self.refuse("float")
    __int__ = lambda self: self.refuse("int")
    __index__ = lambda self: self.refuse("index")
    __array__ = lambda self, *args, **options: self.refuse("array")
    __eq__ = lambda self, other: self.refuse("equal")       # Python's own would be a False, whatever the values
    item = lambda self: self.refuse("item")

    def refuse(self, asked):
        """Raise a Break that says what was asked of which op's result, and leave a note of it on the tape."""
        raise NotImplementedError("begin with this symbol's node: its name stands on the tape, with the op")


def record(op, *operands):
    """Write op(*operands) down; its Symbol. Operands are Symbols of one tape, and numbers; at least one is a Symbol."""
    raise NotImplementedError("begin with what goes into the node: in the place of each Symbol its name, and numbers "
                              "as they are. Then the shape, and the dtype: greater gives \"bool\", all others what "
                              "np.result_type says of the dtypes and numbers")


def result_shape(op, shapes, operands):
    """The shape of a result, from those of the Symbols among the operands. ValueError where they don't fit."""
    raise NotImplementedError("begin with matmul and transpose, of matrices (n, k) and (k, m); sum and max, which "
                              "leave one element of an axis; and for all others NumPy's broadcasting")


def capture(f, shapes, dtypes):
    """(nodes, outputs): what f does, as data, and the names of what it gives.

    f       function of as many arguments as there are shapes; gives one of what it computes, or a tuple of several
    nodes   as on a Tape. First one per argument, in order, whether f uses it or not; then one per op, each after those
            that it needs
    Break   is raised where f asks for a value: the first one that it asked for, also where f has caught the Break and
            gone on without, however it ended
    """
    raise NotImplementedError("begin with a Tape and a Symbol per argument; f does the rest")


def run(nodes, outputs, arrays):
    """The outputs as a list of arrays: what f would give, without f. arrays: one per argument; they aren't changed."""
    raise NotImplementedError("begin with a dict, name: array. OPS has a function for each op")
