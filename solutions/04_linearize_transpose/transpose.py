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
    # begin with an empty Program, and a dict: for a variable of `program`, the number of the new variable that is its
    # cotangent so far. Who finds a cotangent there already adds. Then the equations, last one first
    result, cotangent = Program([program.shapes[v] for v in program.outputs]), {}

    def hand(variable, number):
        if variable in cotangent:
            number = result.emit("add", [cotangent[variable], number])
        cotangent[variable] = number

    for number, variable in enumerate(program.outputs):
        hand(variable, number)
    for out, op, inputs, residual in reversed(program.equations):
        if out not in cotangent:
            continue
        ct = cotangent[out]
        for variable in inputs:
            if op == "add":
                hand(variable, ct)
            elif op == "neg":
                hand(variable, result.emit("neg", [ct]))
            elif op == "scale":
                hand(variable, result.emit("scale", [ct], residual))
            elif op == "matvec":
                hand(variable, result.emit("matvec", [ct], residual.T))
            elif op == "sum":
                [n] = program.shapes[variable]
                hand(variable, result.emit("spread", [ct], n))
            elif op == "spread":
                hand(variable, result.emit("sum", [ct]))
    result.outputs = [cotangent[v] if v in cotangent else result.emit("zero", [], program.shapes[v])
                      for v in range(program.inputs)]
    return result
