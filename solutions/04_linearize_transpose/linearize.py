"""04.2 Run once, and keep what is linear.

Run f on numbers that leave a trace. Everything nonlinear is worked out there and then; what is still unknown is the
tangents, and all that ever happens to a tangent is linear. Write that down, and the derivative is a program.
"""

import numpy as np


class Tracer:
    """A value that is known, and a tangent that isn't: of the tangent there is only its number in a program.

    value    float array, (n,) or ()
    number   the variable of `program` that is this value's tangent
    program  to which equations are appended: program.emit(op, [numbers], residual) is the new variable's number

    The other operand of + and * may be a constant, a number or an array; two Tracers have the same shape.
    """

    __array_ufunc__ = None      # so that NumPy leaves array * tracer to __rmul__

    def __init__(self, value, number, program):
        self.value, self.number, self.program = value, number, program

    def step(self, value, op, inputs, residual=None):
        """A Tracer with this value, whose tangent is op(the variables with the numbers `inputs`; residual)."""
        return Tracer(value, self.program.emit(op, inputs, residual), self.program)

    def __neg__(self):
        return self.step(-self.value, "neg", [self.number])

    def __add__(self, other):
        # begin with another Tracer. And what does a constant do to the tangent? Is there an equation at all?
        if not isinstance(other, Tracer):
            return Tracer(self.value + other, self.number, self.program)
        return self.step(self.value + other.value, "add", [self.number, other.number])

    def __mul__(self, other):
        # begin with a constant, which takes one equation. For two Tracers write down the product rule: three equations
        if not isinstance(other, Tracer):
            return self.step(self.value * other, "scale", [self.number], other)
        by_left = self.program.emit("scale", [self.number], other.value)
        by_right = self.program.emit("scale", [other.number], self.value)
        return self.step(self.value * other.value, "add", [by_left, by_right])

    def __rmatmul__(self, matrix):
        """matrix @ self, with a constant matrix."""
        # begin with W @ x as a function of x: it is linear already
        return self.step(matrix @ self.value, "matvec", [self.number], matrix)

    def sin(self):
        # begin with how fast sin changes at self.value: a known number, or an array of them
        return self.step(np.sin(self.value), "scale", [self.number], np.cos(self.value))

    def tanh(self):
        # begin with t = np.tanh(self.value): the derivative is a short formula in t
        t = np.tanh(self.value)
        return self.step(t, "scale", [self.number], 1 - t * t)

    def sum(self):
        # begin with the tangent of a sum: which of the linear ops is it?
        return self.step(np.sum(self.value), "sum", [self.number])

    def __sub__(self, other):
        return self + -other

    def __radd__(self, other):
        return self + other

    def __rsub__(self, other):
        return -self + other

    def __rmul__(self, other):
        return self * other


def linearize(f, xs, Program):
    """(y, program): f(*xs), and its derivative there, a Program with the tangents of xs as inputs.

    f        takes Tracers, gives one, or an array where the result doesn't depend on xs; it is called once
    xs       list of float arrays, of shape (n,) or (). When the caller overwrites them later, the program must still be
             the derivative at the numbers that they held
    Program  the class of 04.1
    """
    # begin with Program([shapes of xs]) and a Tracer for each of xs, on a copy of it; f does the rest. Then the outputs
    program = Program([x.shape for x in xs])
    y = f(*(Tracer(x.copy(), i, program) for i, x in enumerate(xs)))
    if not isinstance(y, Tracer):
        program.outputs = [program.emit("zero", [], np.shape(y))]
        return y, program
    program.outputs = [y.number]
    return y.value, program
