# 17.1: the first Break is to be raised
import numpy as np

ELEMENTWISE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "greater": np.greater,
               "neg": np.negative, "exp": np.exp, "tanh": np.tanh, "sqrt": np.sqrt}
OPS = ELEMENTWISE | {
    "matmul": np.matmul, "transpose": np.transpose,
    "sum": lambda x, axis: np.sum(x, axis=axis, keepdims=True),
    "max": lambda x, axis: np.max(x, axis=axis, keepdims=True)}


class Break(Exception):

    def __init__(self, asked, op):
        super().__init__(f"{asked}() of what {op} gives: while a function is captured there are no values")
        self.asked, self.op = asked, op


class Tape:

    def __init__(self):
        self.nodes, self.breaks = [], []

    def append(self, op, inputs, shape, dtype):
        name = f"v{len(self.nodes)}"
        self.nodes.append((name, op, tuple(inputs), tuple(shape), str(dtype)))
        return Symbol(self, name, tuple(shape), str(dtype))


class Symbol:

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
    sum = lambda self, axis: record("sum", self, axis)
    max = lambda self, axis: record("max", self, axis)
    T = property(lambda self: record("transpose", self))

    __bool__ = lambda self: self.refuse("bool")
    __float__ = lambda self: self.refuse("float")
    __int__ = lambda self: self.refuse("int")
    __index__ = lambda self: self.refuse("index")
    __array__ = lambda self, *args, **options: self.refuse("array")
    __eq__ = lambda self, other: self.refuse("equal")
    item = lambda self: self.refuse("item")

    def refuse(self, asked):
        op = next(node[1] for node in self.tape.nodes if node[0] == self.name)
        error = Break(asked, op)
        self.tape.breaks.append(error)
        raise error


def record(op, *operands):
    symbols = [o for o in operands if isinstance(o, Symbol)]
    tape = symbols[0].tape
    inputs = [o.name if isinstance(o, Symbol) else o for o in operands]
    shape = result_shape(op, [s.shape for s in symbols], operands)
    if op == "greater":
        dtype = "bool"
    elif op in ("sum", "max"):
        dtype = np.result_type(symbols[0].dtype, 1) if op == "sum" else np.dtype(symbols[0].dtype)
    else:
        dtype = np.result_type(*(np.dtype(o.dtype) if isinstance(o, Symbol) else o for o in operands))
    return tape.append(op, inputs, shape, dtype)


def result_shape(op, shapes, operands):
    if op == "matmul":
        (n, k), (k2, m) = shapes
        if k != k2:
            raise ValueError(f"matmul of {shapes[0]} and {shapes[1]}")
        return n, m
    if op == "transpose":
        n, m = shapes[0]
        return m, n
    if op in ("sum", "max"):
        axis, shape = operands[1], list(shapes[0])
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"{op} over axis {axis} of {shapes[0]}")
        shape[axis] = 1
        return tuple(shape)
    return np.broadcast_shapes(*shapes)


def capture(f, shapes, dtypes):
    tape = Tape()
    arguments = [tape.append("argument", (), shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    try:
        found = f(*arguments)
    except Break:
        if tape.breaks:
            raise tape.breaks[0]
        raise
    if tape.breaks:
        raise tape.breaks[0]
    found = found if isinstance(found, tuple) else (found,)
    return tape.nodes, [s.name for s in found]


def run(nodes, outputs, arrays):
    values, arguments = {}, iter(arrays)
    for name, op, inputs, _, _ in nodes:
        if op == "argument":
            values[name] = next(arguments)
        else:
            values[name] = OPS[op](*(values[i] if isinstance(i, str) else i for i in inputs))
    return [values[name] for name in outputs]
