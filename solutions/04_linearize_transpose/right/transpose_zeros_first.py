# 04.3: every variable begins with a zero
def transpose(program, Program):
    result, cotangent = Program([program.shapes[v] for v in program.outputs]), {}

    def hand(variable, number):
        if variable in cotangent:
            number = result.emit("add", [cotangent[variable], number])
        cotangent[variable] = number

    for variable, shape in enumerate(program.shapes):
        cotangent[variable] = result.emit('zero', [], shape)
    for number, variable in enumerate(program.outputs):
        hand(variable, number)
    for out, op, inputs, residual in program.equations[::-1]:
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
