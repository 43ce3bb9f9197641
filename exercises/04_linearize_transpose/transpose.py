"""04.3 The same program, read upwards.

A linear program is a matrix J that nobody has written out, and this file makes the program of its transpose: equations
in reverse order, each replaced by its own transpose. No derivative is taken here. It has been taken already.
"""


def transpose(program, Program):
    """The transposed program: from cotangents of the outputs to cotangents of the inputs.

    program  a Program (04.1), for any number of inputs and outputs; a variable may be used any number of times, also
             none, and may be several outputs, or input and output at once
    Program  its class: Program(shapes), .emit(op, numbers, residual), .outputs

    The result has one input per output of program, of the same shape, and one output per input of program. An input
    that no output depends on has the cotangent zero.
    """
    raise NotImplementedError("begin with an empty Program, and a dict: for a variable of `program`, the number of "
                              "the new variable that is its cotangent so far. Who finds a cotangent there already "
                              "adds. Then the equations, last one first")
