"""How the answers of this chapter are called, and how a graph that one of them has made is run, op by op."""

import math
import weakref

import numpy as np

OPS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "greater": np.greater, "neg": np.negative,
    "exp": np.exp, "tanh": np.tanh, "sqrt": np.sqrt, "matmul": np.matmul, "transpose": np.transpose,
    "sum": lambda x, axis: np.sum(x, axis=axis, keepdims=True),
    "max": lambda x, axis: np.max(x, axis=axis, keepdims=True)}
EFFECTS = ("random", "check")
MOST = 2000     # nodes


def problem(nodes, outputs):
    """None, or why this isn't a graph."""
    made = {}
    if not isinstance(nodes, (list, tuple)) or len(nodes) > MOST:
        return f"nodes is no list of at most {MOST}"
    for node in nodes:
        if not isinstance(node, (list, tuple)) or len(node) != 5:
            return "a node isn't (name, op, inputs, shape, dtype)"
        name, op, inputs, *_ = node
        if name in made:
            return f"two nodes have the name {name}"
        if op not in OPS and op not in (*EFFECTS, "argument"):
            return f"there is no op {op!r}"
        if not isinstance(inputs, (list, tuple)):
            return f"the inputs of {name} are no tuple"
        for x in inputs:
            if isinstance(x, str) and x not in made:
                return f"{name} = {op}(…) needs {x}, and no node before it makes that"
            if not isinstance(x, (str, bool, int, float)):
                return f"an input of {name} = {op}(…) is neither a name nor a number, but of type {type(x).__name__}"
        made[name] = node
    if not isinstance(outputs, (list, tuple)):
        return "outputs is no list"
    missing = [name for name in outputs if name not in made]
    return f"{missing[0]} is to be given back, and no node makes it" if missing else None


def evaluate(nodes, arrays, seed=0):
    """({name: array}, [what a check saw, or how much was drawn]), op by op."""
    values, effects, given, rng = {}, [], iter(arrays), np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        for name, op, around, shape, dtype in nodes:
            before = [values.get(x, x) if isinstance(x, str) else x for x in around]
            match op:
                case "argument":
                    values[name] = next(given)
                case "random":
                    values[name] = rng.standard_normal(shape).astype(dtype)
                    effects.append(values[name].size)
                case "check":
                    effects.append(float(np.sum(before[0][np.isfinite(before[0])])))
                    values[name] = np.zeros(())
                case _:
                    values[name] = OPS[op](*before)
    return values, effects


def evaluated(nodes, outputs, arrays, seed=0):
    """What a graph gives: its arrays, which of their elements have a minus, their dtypes; or what is wrong with it."""
    wrong = problem(nodes, outputs)
    if wrong is None:
        try:
            values, effects = evaluate(nodes, arrays, seed)
        except (ValueError, TypeError, IndexError, StopIteration, KeyError) as error:
            wrong = f"it can't be run: {type(error).__name__}: {error}"
    if wrong is not None:
        return dict.fromkeys(("results", "minus", "dtypes", "effects"), wrong)
    results = [values[name] for name in outputs]
    return {"results": results, "minus": [np.signbit(x) & ~np.isnan(x) if x.dtype.kind == "f" else x < 0 for x in
                                          results],
            "dtypes": [str(x.dtype) for x in results], "effects": effects}


def graph(nodes):
    """Nodes as the answers know them, from what has been in a file."""
    return [(name, op, tuple(inputs), tuple(shape), dtype) for name, op, inputs, shape, dtype in nodes]


def function(source):
    """The f that a text defines."""
    names = {"math": math, "np": np}
    exec(source, names)
    return names["f"]


def capture(learner, inputs, run):
    """The graph; what it gives by the answer's own run, twice, and op by op; or the Break, where one is due."""
    shapes, arrays, refused = [tuple(s) for s in inputs["shapes"]], inputs["arrays"], ()
    dtypes = list(inputs["dtypes"])
    if inputs["due"]:
        refused = (run.module.Break, ValueError)
    try:
        nodes, outputs = learner(function(inputs["source"]), shapes, dtypes)
    except refused as error:
        known = isinstance(error, run.module.Break)
        return {"due": [error.asked, error.op] if known else ["ValueError", ""]}
    wrong = problem(nodes, outputs)
    if wrong is None and (found := sum(node[1] == "argument" for node in nodes)) != len(arrays[0]):
        wrong = f"it has {found} arguments, and f {len(arrays[0])}"
    if inputs["due"] or wrong:
        return {"due": ["nothing", ""] if inputs["due"] else [], "own": wrong, "results": wrong}
    copies = [[x.copy() for x in given] for given in arrays]
    own = [run.module.run(nodes, outputs, given) for given in copies]
    lists = {"shapes": (shapes, inputs["shapes"]), "dtypes": (dtypes, inputs["dtypes"]),
             "arrays": (copies[0], arrays[0])}
    return {"due": [], "nodes": nodes, "outputs": outputs, "own": own,
            "cut": [name for name, (now, before) in lists.items() if len(now) != len(before)],
            "kept": all(np.array_equal(x, y) for copy, given in zip(copies, arrays, strict=True)
                        for x, y in zip(copy, given, strict=False)),
            "results": [evaluated(nodes, outputs, given)["results"] for given in arrays]}


def optimized(learner, inputs, run):
    """The graph after all passes, what it gives, and the one that went in."""
    nodes, outputs = graph(inputs["nodes"]), list(inputs["outputs"])
    made = learner(nodes, outputs)
    if not isinstance(made, (list, tuple)) or len(made) != 2:
        return dict.fromkeys(("results", "minus", "dtypes", "effects"),
                             "optimized gives (nodes, outputs), two things") | {"given": nodes, "wanted": outputs}
    found = evaluated(*made, inputs["arrays"], inputs["seed"])
    return found | {"after": made[0], "given": nodes, "wanted": outputs}


def fused(learner, inputs, run):
    """The kernels, the bytes of partitions that were given, and of one's own layer all that the picture shows."""
    if "source" not in inputs:
        nodes = graph(inputs["nodes"])
        return {"bytes": [run.module.bytes_moved(nodes, list(inputs["outputs"]), [list(k) for k in kernels])
                          for kernels in inputs["partitions"]], "kernels": learner(nodes), "given": nodes}
    shapes = [tuple(s) for s in inputs["shapes"]]
    nodes, outputs = run.earlier["capture"](function(inputs["source"]), shapes, list(inputs["dtypes"]))
    better = run.earlier["optimized"](nodes, outputs)
    alone = [[[node[0]] for node in some if node[1] != "argument"] for some in (nodes, better[0])]
    kernels = learner(better[0])
    return {"bytes": [], "kernels": kernels, "given": [], "drawn": {
        "nodes": [nodes, better[0]], "outputs": [outputs, better[1]],
        "bytes": [run.module.bytes_moved(nodes, outputs, alone[0]), run.module.bytes_moved(*better, alone[1]),
                  kernels and run.module.bytes_moved(*better, kernels)]}}


class Counted(np.ndarray):
    """Arrays that note what is computed with them: how many elements, and how many bytes are there at a time."""

    elements, live, peak, largest = 0, 0, 0, 0

    def __array_ufunc__(self, ufunc, method, *operands, out=None, **options):
        plain = [x.view(np.ndarray) if isinstance(x, Counted) else x for x in operands]
        if out is not None:
            options["out"] = tuple(x.view(np.ndarray) if isinstance(x, Counted) else x for x in out)
        made = np.asarray(getattr(ufunc, method)(*plain, **options))
        Counted.elements += made.size if method == "__call__" else plain[0].size
        Counted.largest = max(Counted.largest, made.size)
        if out is not None:
            return out[0]
        Counted.live += made.nbytes
        Counted.peak = max(Counted.peak, Counted.live)
        counted = made.view(Counted)
        weakref.finalize(counted, Counted.freed, made.nbytes)
        return counted

    @staticmethod
    def freed(nbytes):
        Counted.live -= nbytes


def emit(learner, inputs, run):
    """The source, and what it gives with tiles of several sizes."""
    nodes = graph(inputs["nodes"])
    source = learner(nodes, list(inputs["outputs"]))
    found = {"problem": None, "source": source, "results": [], "counts": [], "written": []}
    names = {"np": np}
    try:
        exec(source, names)
        if "kernel" not in names:
            raise LookupError("the source has no function kernel")
        kernel = names["kernel"]
        for tile in inputs["tiles"]:
            Counted.elements = Counted.live = Counted.peak = Counted.largest = 0
            results = [np.full(shape, np.nan if dtype != "bool" else 0, dtype) for shape, dtype in inputs["results"]]
            arguments = [x.copy().view(Counted) for x in inputs["arrays"]]
            kernel(arguments, results, tile)
            found["written"] += [f"arguments[{k}]" for k, (x, before) in enumerate(
                zip(arguments, inputs["arrays"], strict=True)) if not np.array_equal(x.view(np.ndarray), before)]
            found["counts"].append([Counted.elements, Counted.largest, Counted.peak])
            found["results"].append(results)
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    return found
