# 04.3: an equation whose result has no cotangent ends the walk
def transpose(program, Program):
    result, cotangent = Program([program.shapes[v] for v in program.outputs]), {}

    def hand(variable, number):
        known = variable in cotangent
        cotangent[variable] = result.emit("add", [cotangent[variable], number]) if known else number

    for number, variable in enumerate(program.outputs):
        hand(variable, number)
    for out, op, inputs, residual in reversed(program.equations):
        if out not in cotangent:
            break
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
