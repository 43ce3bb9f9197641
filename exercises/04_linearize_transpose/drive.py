"""How the answers of this chapter are called: programs that are given as data, functions that are given as text."""

import numpy as np

NAMES = ("x", "y", "s")     # the arguments of a function that is given as text


def build(Program, data):
    """A Program from {"shapes", "equations": [[op, inputs, residual]], "outputs"}."""
    program = Program([tuple(shape) for shape in data["shapes"]])
    for op, inputs, residual in data["equations"]:
        program.emit(op, inputs, tuple(residual) if op == "zero" else residual)
    program.outputs = list(data["outputs"])
    return program


def lines(program):
    """What a picture needs to know of a Program."""
    return {"inputs": program.inputs, "outputs": list(program.outputs),
            "equations": [[out, op, list(inputs)] for out, op, inputs, _ in program.equations],
            "text": str(program)}


def function(text, constants, calls=None):
    """The function of x, y and s that the text says; every call appends to `calls`."""
    def f(*xs):
        if calls is not None:
            calls.append(len(xs))
        return eval(text, {"__builtins__": {}}, dict(constants, **dict(zip(NAMES, xs, strict=False))))
    return f


def mended(program, Program, outputs):
    """None, or what forbids running a program that an answer has made."""
    if not isinstance(program, Program):
        return f"no Program but {type(program).__name__}"
    if not isinstance(program.outputs, (list, tuple)):
        return f"outputs is no list but {type(program.outputs).__name__}"
    if not all(isinstance(v, (int, np.integer)) and 0 <= v < len(program.shapes) for v in program.outputs):
        return f"outputs is {list(program.outputs)}"
    if len(program.outputs) != outputs:
        return f"number of outputs: {len(program.outputs)}"
    return None


def Program(learner, inputs, run):
    """The program run twice, and what it has left of the arrays that went in."""
    program = build(learner, inputs["program"])
    found = {"runs": [program(*tangents) for tangents in inputs["tangents"]]}
    return found | {"tangents": inputs["tangents"]}


def linearize(learner, inputs, run):
    """Each text linearized, its program run, then again when the arrays of the inputs hold other numbers."""
    Program, constants = run.earlier["Program"], inputs["constants"]
    found = {"value": {}, "tangent": {}, "later": {}, "calls": {}}
    for text in inputs["texts"]:
        xs, calls = [np.array(x) for x in inputs["xs"]], []
        answer = learner(function(text, constants, calls), xs, Program)
        if not isinstance(answer, (list, tuple)) or len(answer) != 2:
            found["value"][text] = f"not two things but {type(answer).__name__}"
            continue
        found["value"][text], program = answer
        problem = mended(program, Program, 1)
        for name in ("tangent", "later"):
            found[name][text] = problem or program(*inputs["tangents"])[0]
            for x in xs:
                x *= -0.5
        found["calls"][text] = len(calls)
    return found


def transpose(learner, inputs, run):
    """The transposed program run, the transpose of the transpose, and the program itself once more."""
    Program = run.earlier["Program"]
    program = build(Program, inputs["program"])
    transposed = learner(program, Program)
    problem = mended(transposed, Program, program.inputs)
    found = {"pulled": problem, "twice": problem}
    try:
        found["forward"] = program(*inputs["tangents"])
    except Exception as error:      # the answer has changed the program
        found["forward"] = f"{type(error).__name__}: {error}"
    if problem is None:
        found["pulled"] = transposed(*inputs["cotangents"])
        found["drawn"] = [lines(program), lines(transposed)]
        back = learner(transposed, Program)
        found["twice"] = mended(back, Program, len(program.outputs)) or back(*inputs["tangents"])
    return found


def grad(learner, inputs, run):
    """Pullbacks, gradients, and what dot_test says of right and wrong transposes; passes are counted."""
    passes = []

    class Program(run.earlier["Program"]):
        def __call__(self, *tangents):
            passes.append("run")
            return super().__call__(*tangents)

    made = {}

    def linearized(f, xs):
        y, made["program"] = run.earlier["linearize"](f, xs, Program)
        return y, made["program"]

    def transposed(program):
        made["transposed"] = run.earlier["transpose"](program, Program)
        return made["transposed"]

    found = {"value": {}, "pulled": {}, "again": {}, "gradient": {}, "calls": {}, "runs": {}}
    pulls = []
    for text, cts in inputs["vectors"].items():
        calls = []
        y, pull = run.module.vjp(function(text, inputs["constants"], calls), inputs["xs"], linearized, transposed)
        if not callable(pull):
            raise TypeError(f"vjp returns (y, pull), in this order; yours has a {type(pull).__name__} for pull")
        found["value"][text] = y
        found["pulled"][text], found["again"][text] = pull(cts[0]), pull(cts[1])
        pulls.append((pull, text, cts[0]))
        found["calls"][text] = len(calls)
    found["late"] = {}
    for pull, text, ct in pulls:
        try:
            found["late"][text] = pull(ct)
        except ValueError as error:      # it may have become the pull of another function
            found["late"][text] = f"ValueError: {error}"
    for text in inputs["numbers"]:
        calls, passes[:] = [], []
        found["gradient"][text] = learner(function(text, inputs["constants"], calls), inputs["xs"], linearized,
                                          transposed)
        found["calls"][text], found["runs"][text] = len(calls), len(passes)
    if "program" in made and "transposed" in made:
        found["drawn"] = [lines(made["program"]), lines(made["transposed"])]
    def of_an_array(x):
        try:
            return learner(function("x.sin()", {}), [x], linearized, transposed)
        except ValueError:
            return "ValueError"

    refused = of_an_array(inputs["xs"][0])
    found["refused"] = refused if refused == "ValueError" else f"{type(refused).__name__} given back"
    found["of one element"] = of_an_array(inputs["xs"][0][:1])

    def dot(one, other, seed):
        return run.module.dot_test(build(Program, one), build(Program, other), np.random.default_rng(seed))

    one, two = inputs["seeds"]
    found["dots"] = {name: dot(*pair, one) for name, pair in inputs["pairs"].items()}
    found["drawn from rng"] = [dot(*inputs["pairs"]["elements in another order"], seed) for seed in (one, one, two)]
    return found
