# 04.3: each variable asks those equations that use it
def transpose(program, Program):
    new = Program([program.shapes[v] for v in program.outputs])
    uses = {v: [] for v in range(len(program.shapes))}
    for equation in program.equations:
        for v in equation.inputs:
            uses[v].append(equation)
    known = {}

    def through(equation, ct, v):
        op, residual = equation.op, equation.residual
        return {"add": lambda: ct,
                "neg": lambda: new.emit("scale", [ct], -1.0),
                "scale": lambda: new.emit("scale", (ct,), residual),
                "matvec": lambda: new.emit("matvec", [ct], residual.T.copy()),
                "sum": lambda: new.emit("spread", [ct], program.shapes[v][0]),
                "spread": lambda: new.emit("sum", [ct])}[op]()

    def cotangent(v):
        if v not in known:
            total = None
            arriving = [n for n, out in enumerate(program.outputs) if out == v]
            for equation in uses[v]:
                ct = cotangent(equation.out)
                if ct is not None:
                    arriving.append(through(equation, ct, v))
            for one in arriving:
                total = one if total is None else new.emit("add", [total, one])
            known[v] = total
        return known[v]

    found = [cotangent(v) for v in range(program.inputs)]
    new.outputs = tuple(new.emit("zero", [], program.shapes[v]) if ct is None else ct for v, ct in enumerate(found))
    return new
