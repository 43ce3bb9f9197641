# 04.1: has shape [10]; expected [5]
from typing import NamedTuple

import numpy as np


class Equation(NamedTuple):

    out: int
    op: str
    inputs: tuple
    residual: object = None


class Program:

    def __init__(self, shapes):
        self.shapes, self.inputs, self.equations, self.outputs = list(shapes), len(shapes), [], []

    def emit(self, op, inputs, residual=None):
        shape = result_shape(op, [self.shapes[i] for i in inputs], residual)
        self.shapes.append(shape)
        self.equations.append(Equation(len(self.shapes) - 1, op, tuple(inputs), residual))
        return len(self.shapes) - 1

    def __call__(self, *tangents):
        if [np.shape(t) for t in tangents] != self.shapes[:self.inputs]:
            raise ValueError(f"the inputs have the shapes {[np.shape(t) for t in tangents]}, the program is one for "
                             f"{self.shapes[:self.inputs]}")
        values = list(tangents)
        for equation in self.equations:
            values.append(apply(equation.op, [values[i] for i in equation.inputs], equation.residual))
        return [values[i] for i in self.outputs]

    def __str__(self):
        lines = [f"inputs {', '.join(letter(i) for i in range(self.inputs))}"]
        for out, op, inputs, residual in self.equations:
            behind = "" if residual is None else f"; {brief(residual)}"
            lines.append(f"  {letter(out)} = {op}({', '.join(map(letter, inputs))}{behind})")
        return "\n".join([*lines, f"return {', '.join(map(letter, self.outputs))}"])


def apply(op, inputs, residual):
    run = {
        "neg": lambda a: -a,
        "add": lambda a, b: a + b,
        "scale": lambda a: residual * a,
        "matvec": lambda a: residual @ a,
        "sum": lambda a: np.sum(a),
        "spread": lambda a: [a] * residual,
        "zero": lambda: np.zeros(residual),
    }
    return run[op](*inputs)


def result_shape(op, shapes, residual):
    r = np.shape(residual)
    fits = {
        "neg": lambda a: a,
        "add": lambda a, b: a if a == b else None,
        "scale": lambda a: a if r in ((), a) else None,
        "matvec": lambda a: r[:1] if len(r) == 2 and r[1:] == a else None,
        "sum": lambda a: () if len(a) == 1 else None,
        "spread": lambda a: (int(residual),) if a == () else None,
        "zero": lambda: tuple(residual),
    }
    if op not in fits:
        raise ValueError(f"{op!r} is none of the linear ops: {', '.join(fits)}")
    if callable(residual):
        raise TypeError(f"the residual of {op} is a function; a program holds numbers, worked out when it was made")
    if residual is not None and np.asarray(residual).dtype == object:
        raise TypeError(f"the residual of {op} is a {type(residual).__name__}; a program holds numbers: its value")
    shape = fits[op](*shapes)
    if shape is None:
        raise ValueError(f"{op} doesn't fit: of variables of shape {', '.join(str(list(s)) for s in shapes)}, with a "
                         f"residual of shape {list(r)}")
    return shape


def letter(number):
    return "abcdefghijklmnopqrstuvwxyz"[number % 26] + (str(number // 26) if number > 25 else "")


def brief(residual):
    return f"{'×'.join(map(str, residual.shape))} numbers" if np.ndim(residual) and hasattr(residual, "shape") \
        else str(residual)
