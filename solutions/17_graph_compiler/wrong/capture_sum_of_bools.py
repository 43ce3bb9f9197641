# 17.1: a sum of bools is how many are True, an int64
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
        op = next(node[1] for node in self.tape.nodes if node[0] == self.name)
        error = Break(asked, op)
        self.tape.breaks.append(error)
        raise error


def record(op, *operands):
    symbols = [x for x in operands if isinstance(x, Symbol)]
    tape = next(x.tape for x in symbols)
    inputs = [x.name if isinstance(x, Symbol) else x for x in operands]
    given = operands[:1] if op in ("sum", "max") else operands
    dtype = "bool" if op == "greater" else np.result_type(*(x.dtype if isinstance(x, Symbol) else x for x in given))
    return tape.append(op, inputs, result_shape(op, [x.shape for x in symbols], operands), dtype)


def result_shape(op, shapes, operands):
    if op == "matmul":
        (n, k), (other, m) = shapes
        if k != other:
            raise ValueError(f"matmul of matrices that don't fit: {k} columns, but {other} rows")
        return n, m
    first, *_ = shapes
    if op == "transpose":
        return first[::-1]
    if op == "sum" or op == "max":
        axis = range(len(first))[operands[1]]
        return first[:axis] + (1,) + first[axis + 1:]
    return np.broadcast_shapes(*shapes)


def capture(f, shapes, dtypes):
    tape = Tape()
    arguments = [tape.append("argument", (), shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    try:
        results = f(*arguments)
    finally:
        if tape.breaks:
            raise tape.breaks[0]
    return tape.nodes, [result.name for result in (results if isinstance(results, tuple) else [results])]


def run(nodes, outputs, arrays):
    values, given = {}, iter(arrays)
    for name, op, inputs, _, _ in nodes:
        operands = [values[x] if isinstance(x, str) else x for x in inputs]
        values[name] = next(given) if op == "argument" else OPS[op](*operands)
    return [values[name] for name in outputs]
