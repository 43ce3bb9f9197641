"""04.1 A linear function as a list of equations.

Every derivative is a linear function: of the tangents. This file writes one down as data, a short program without
branches or loops that can be run, printed and (in 04.3) turned round.
"""

from typing import NamedTuple

import numpy as np


class Equation(NamedTuple):
    """One line of a program: the variable `out` is op(variables `inputs`; residual)."""

    out: int
    op: str
    inputs: tuple
    residual: object = None


class Program:
    """A linear function of some arrays. Its variables have numbers: the inputs come first, then one per equation.

    shapes     of all variables, by number: (n,) for a vector, () for a number
    inputs     how many of the variables are inputs
    equations  [Equation], in the order in which they run
    outputs    numbers of the variables that are given back; whoever makes a program sets them

    The ops, and the residuals that they need:

        neg(a)        -a
        add(a, b)     a + b
        scale(a; r)   r·a, element by element; r is a number, or an array of a's shape
        matvec(a; W)  W @ a, with a matrix W
        sum(a)        the sum of a's elements, one number
        spread(a; n)  a vector of n elements, each of them the number a
        zero(; s)     zeros of shape s, made of no variable at all
    """

    def __init__(self, shapes):
        """A program without equations, for inputs of these shapes."""
        self.shapes, self.inputs, self.equations, self.outputs = list(shapes), len(shapes), [], []

    def emit(self, op, inputs, residual=None):
        """Append an equation, inputs being numbers of variables; the number of the new variable."""
        shape = result_shape(op, [self.shapes[i] for i in inputs], residual)
        self.shapes.append(shape)
        self.equations.append(Equation(len(self.shapes) - 1, op, tuple(inputs), residual))
        return len(self.shapes) - 1

    def __call__(self, *tangents):
        """Run the program: a list of arrays, one per output, for these arrays as inputs, which stay as they are."""
        if [np.shape(t) for t in tangents] != self.shapes[:self.inputs]:
            raise ValueError(f"the inputs have the shapes {[np.shape(t) for t in tangents]}, the program is one for "
                             f"{self.shapes[:self.inputs]}")
        # begin with a list of the values of all variables, by number: at first there are the inputs, and each
        # equation appends one more
        values = list(tangents)
        for equation in self.equations:
            values.append(apply(equation.op, [values[i] for i in equation.inputs], equation.residual))
        return [values[i] for i in self.outputs]

    def __str__(self):
        """The program, to be read: variables as letters."""
        lines = [f"inputs {', '.join(letter(i) for i in range(self.inputs))}"]
        for out, op, inputs, residual in self.equations:
            behind = "" if residual is None else f"; {brief(residual)}"
            lines.append(f"  {letter(out)} = {op}({', '.join(map(letter, inputs))}{behind})")
        return "\n".join([*lines, f"return {', '.join(map(letter, self.outputs))}"])


def apply(op, inputs, residual):
    """The value of op(inputs; residual), a new array; inputs is a list of none, one or two arrays."""
    # begin with one `if` per line of the table of ops in Program, or with a dict of functions
    run = {
        "neg": lambda a: -a,
        "add": lambda a, b: a + b,
        "scale": lambda a: residual * a,
        "matvec": lambda a: residual @ a,
        "sum": lambda a: np.sum(a),
        "spread": lambda a: np.full(residual, a),
        "zero": lambda: np.zeros(residual),
    }
    return run[op](*inputs)


def result_shape(op, shapes, residual):
    """The shape of op's result. ValueError where shapes don't fit, or there is no such op."""
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
    """a, b, … z, a1, b1, …"""
    return "abcdefghijklmnopqrstuvwxyz"[number % 26] + (str(number // 26) if number > 25 else "")


def brief(residual):
    """A residual in a few characters."""
    return f"{'×'.join(map(str, residual.shape))} numbers" if np.ndim(residual) and hasattr(residual, "shape") \
        else str(residual)
