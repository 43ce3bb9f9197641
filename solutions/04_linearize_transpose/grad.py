"""04.4 A gradient, and how to know that it is one.

The two halves together: forward mode once, by linearize, and its transpose. Whoever has a transpose can test it without
knowing the derivative: ⟨u, J·v⟩ and ⟨Jᵀ·u, v⟩ are the same number, for all u and v.
"""

import numpy as np


def vjp(f, xs, linearize, transpose):
    """(y, pull): f(*xs), and the function pull(u) = Jᵀ·u, a list of arrays, one per x, for a u of y's shape.

    f          takes values that can be traced (04.2), gives one
    xs         list of float arrays
    linearize  linearize(f, xs) is (y, program), 04.2
    transpose  transpose(program) is a program, 04.3

    f is called once, however often pull is.
    """
    # begin with linearize and transpose, here and not in pull. Programs are called with arrays, and give a list
    y, program = linearize(f, xs)
    transposed = transpose(program)

    def pull(u):
        return transposed(u)
    return y, pull


def grad(f, xs, linearize, transpose):
    """The gradient of f at xs, a list of arrays, one per x. f gives one number, of shape (); for an array of several
    there is a ValueError. An array of one element, of shape (1,), may be refused as well, or taken for its number."""
    # begin with vjp. Which u, of y's shape, makes Jᵀ·u the gradient?
    y, pull = vjp(f, xs, linearize, transpose)
    if np.shape(y) != ():
        raise ValueError(f"a gradient is one of a single number, f gives an array of shape {np.shape(y)}")
    return pull(1.0)


def dot_test(program, transposed, rng):
    """How far ⟨u, J·v⟩ and ⟨Jᵀ·u, v⟩ are apart for random u and v: |difference| / the larger magnitude, a float.

    program, transposed  Programs that claim to be J and Jᵀ; program.shapes, .inputs and .outputs are in 04.1
    rng                  a numpy.random.Generator

    About 1e-16 for a right transpose, also where both numbers are 0; for a wrong one nearer to 1.
    """
    # begin with random v, one array per input, and random u, one per output, all different. ⟨·, ·⟩ sums over all arrays
    v = [rng.standard_normal(shape) for shape in program.shapes[:program.inputs]]
    u = [rng.standard_normal(program.shapes[i]) for i in program.outputs]
    forward = sum(np.sum(a * b) for a, b in zip(u, program(*v), strict=True))
    backward = sum(np.sum(a * b) for a, b in zip(transposed(*u), v, strict=True))
    largest = max(abs(forward), abs(backward))
    return float(abs(forward - backward) / largest) if largest else 0.0
