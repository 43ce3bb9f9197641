# 04.3: each equation is visited once
def transpose(program, Program):
    result, cotangent = Program([program.shapes[v] for v in program.outputs]), {}

    def hand(variable, number):
        if variable in cotangent:
            number = result.emit("add", [cotangent[variable], number])
        cotangent[variable] = number

    def visit(variable, ct):
        hand(variable, ct)
        if variable >= program.inputs:
            through(program.equations[variable - program.inputs], ct)

    def through(equation, ct):
        out, op, inputs, residual = equation
        for variable in inputs:
            if op == "add":
                visit(variable, ct)
            elif op == "neg":
                visit(variable, result.emit("neg", [ct]))
            elif op == "scale":
                visit(variable, result.emit("scale", [ct], residual))
            elif op == "matvec":
                visit(variable, result.emit("matvec", [ct], residual.T))
            elif op == "sum":
                [n] = program.shapes[variable]
                visit(variable, result.emit("spread", [ct], n))
            elif op == "spread":
                visit(variable, result.emit("sum", [ct]))
    for number, variable in enumerate(program.outputs):
        visit(variable, number)
    result.outputs = [cotangent[v] if v in cotangent else result.emit("zero", [], program.shapes[v])
                      for v in range(program.inputs)]
    return result
