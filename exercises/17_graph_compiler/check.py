"""What the answers of chapter 17 are tried with, and the mistakes that are known."""

import math

import numpy as np

from exercises.frame import Check, demand, gives, when

from . import drawing, graphs, tiles, traps
from .drive import evaluate

# ---------------------------------------------------------------- 17.1


def broken(kind):
    """Whether a Break (or ValueError) that was due is there in another form."""
    return lambda case, got: bool(case["due"]) and kind(case["due"], got["due"])


def malformed(case, got):
    return isinstance(got["results"], str)


def kept(case, got):
    """There are more arguments than the function has, or the Break is the first one that there ever was."""
    return "arguments, and f" in got["results"] if "results" in got else got["due"] == graphs.FUNCTIONS["if"][-1]


def own(case, got):
    """The graph is right, and what the answer's run makes of it isn't."""
    return not case["due"] and all(np.allclose(g, w, equal_nan=True) and np.shape(g) == np.shape(w) for gs, ws in zip(
        got["results"], expected(case), strict=True) for g, w in zip(gs, ws, strict=True))


def expected(case):
    return [graphs.called(case["source"], arrays) for arrays in case["arrays"]]


def swapped(case, got):
    """Some sub or div has its number on the wrong side: the results are those of the mirrored op."""
    return case["function"].startswith(("reflected", "mask"))


def outputs_of(which):
    def predicate(case, got):
        return len(got["outputs"]) != len(expected(case)[0]) and which(len(got["outputs"]))
    return predicate


def once_only(case, got):
    return case["function"] == "an argument as output" and len(set(got["outputs"])) == len(got["outputs"]) == 2


def other_types(case, got, results="results"):
    """[(the results' dtypes by the graph, by f)] where they differ."""
    pairs = [([str(np.asarray(x).dtype) for x in one] for one in both)
             for both in zip(got[results], expected(case), strict=True)]
    return [(mine, right) for mine, right in pairs if mine != right]


def arguments(case, got):
    """The nodes begin with one argument after the other."""
    n = len(case["shapes"])
    return case["due"] or ([node[1] == "argument" for node in got["nodes"]] ==
                           [k < n for k in range(len(got["nodes"]))])


def found_in(nodes, arrays, what):
    """The nodes whose shape (3) or dtype (4) isn't that of what they give."""
    values = evaluate(nodes, arrays)[0]
    seen = {3: lambda x: list(x.shape), 4: lambda x: str(x.dtype)}[what]
    return [(node, seen(values[node[0]])) for node in nodes
            if node[1] != "check" and node[what] != seen(values[node[0]])]


def why(op, what):
    """What is to be remembered of an op's shape or dtype."""
    if what == 4:
        return {"greater": "a comparison gives bools", "sum": "a sum of bools is how many are True, an int64"}.get(
            op, "a number in Python doesn't make float64 of float32, but an int makes int64 of a bool")
    if op in ("sum", "max"):
        return "of the axis one element is left, and a negative axis is counted from the end"
    return "shapes are aligned at their ends, and an axis of 1 is stretched"


def differing(what, kind):
    def sentence(case, got):
        node, true = found_in(got["nodes"], case["arrays"][0], what)[0]
        inputs = ", ".join(map(str, node[2]))
        return (f"right in numbers, but {node[0]} = {node[1]}({inputs}) of “{case['function']}” stands there with the "
                f"{kind} {node[what]}, and its values have {true}: {why(node[1], what)}")
    return demand(sentence, lambda case, got: case["due"] or not found_in(
        got["nodes"], case["arrays"][0], what))


class Capture(Check):
    exercise = "17.1"
    tolerance = 1e-5
    signatures = [
        *graphs.CAUGHT_SAID,
        when(lambda case: f"“{case['function']}” has shapes that don't fit, and no ValueError says so: the graph would "
                          "fail when it is run, far from the line that is wrong. " + (
                              "A matmul's inner sizes must be equal: a 1 isn't stretched there" if "@" in case["source"]
                              else "Shapes are aligned at their ends, and only an axis of 1 is stretched"),
             broken(lambda due, got: due[0] == "ValueError" and got[0] == "nothing")),
        when(lambda case: f"“{case['function']}” asks for a value, and a graph comes out: it holds the value of an "
                          "example, frozen, or one of two branches. A Break is due",
             broken(lambda due, got: due[0] != "ValueError" and got[0] == "nothing")),
        when(lambda case, got: f"the Break names the op {got['due'][1]}, but the value that was asked for is that of "
                               f"{case['due'][1]}: look the symbol's own name up on the tape",
             broken(lambda due, got: due[0] == got[0] and due[1] != got[1])),
        when(lambda case, got: f"the Break says that {got['due'][0]} was asked for, and it was {case['due'][0]}",
             broken(lambda due, got: due[0] != got[0])),
        when(lambda case, got: f"“{case['function']}” asks for {case['due'][0]} of {case['due'][1]}; yours says "
                               f"{' of '.join(got['due'])}. A Break is made where the value is asked for, in refuse",
             broken(lambda due, got: got[0] != "nothing")),
        when("f gives one of its results twice, and the graph once: outputs has a name for each that f gives",
             once_only),
        when("an argument that f doesn't use has no node: then run takes the next array for it",
             lambda case, got: case["function"] in ("unused argument", "an argument as output")),
        when("the tape holds what was captured before as well: every capture begins a new one", kept),
        when(lambda case, got: f"what comes out is no graph: {got['results']}", malformed),
        when("the graph gives fewer outputs than f: where f gives a tuple, each of its Symbols is an output",
             outputs_of(lambda n: n <= 1)),
        when("run gives something other than op by op NumPy gives on the same graph, which is right. Numbers among the "
             "inputs are operands too, in their places; arguments come in the order of the nodes", own),
        when("a number has changed sides: 3 - x was written down as x - 3. inputs holds the operands in the order in "
             "which the op has them, names and numbers mixed", swapped),
    ]
    demands = [
        demand(lambda case, got: f"right, but the nodes of “{case['function']}” begin with "
                                 f"{sum(node[1] == 'argument' for node in got['nodes'])} arguments in the wrong "
                                 "places: one per shape, first of all", arguments),
        demand(lambda case, got: f"right, but “{case['function']}” has {case['ops']} ops, and the graph "
                                 f"{graphs.ops(got['nodes'])}: a value that is used twice is computed once. Write an "
                                 "op down when it happens, not when its result is used",
               lambda case, got: case["due"] or graphs.ops(got["nodes"]) <= case["ops"]),
        demand(lambda case, got: "right in numbers, but “{}” gives {}, and its graph {}: a 2 that has become 2.0 makes "
                                 "float64 of a mask. Write numbers down as they are".format(
                                     case["function"], *map(", ".join, other_types(case, got)[0][::-1])),
               lambda case, got: case["due"] or not other_types(case, got)),
        demand(lambda case, got: "the graph is right, but where “{}” gives {}, run gives {}: it takes arrays as they "
                                 "are".format(case["function"],
                                              *map(", ".join, other_types(case, got, "own")[0][::-1])),
               lambda case, got: case["due"] or not other_types(case, got, "own")),
        demand("the results are right, but run has written into the arrays that it was given: they are the caller's",
               lambda case, got: case["due"] or got["kept"]),
        demand(lambda case, got: f"right, but the list {got['cut'][0]} isn't as long as before the call: it is the "
                                 "caller's. Take from it with iter, not with pop",
               lambda case, got: case["due"] or not got["cut"]),
        differing(3, "shape"), differing(4, "dtype"),
    ]

    def cases(self, rng, ranks):
        return graphs.function_cases(rng)

    def truth(self, case):
        if case["due"]:
            return {"due": case["due"]}
        return {"due": [], "results": expected(case), "own": expected(case)}


# ---------------------------------------------------------------- 17.2

def only_in(names):
    """Whether it is only these graphs that are wrong."""
    return lambda case, got: case["graph"] in names.split(", ") and not malformed(case, got)


def lost(case, got):
    """The arguments that are gone."""
    return {n[0] for n in case["nodes"] if n[1] == "argument"} - {n[0] for n in got["after"] if n[1] == "argument"}


def used(case):
    """The names that an output or an effect needs, at whatever distance."""
    found = set(case["outputs"])
    for name, op, inputs, *_ in reversed(case["nodes"]):
        if name in found or op in ("check", "random"):
            found |= {x for x in inputs if isinstance(x, str)}
    return found


def left(name, sentence):
    return demand("right, but " + sentence, lambda case, got: case["graph"] != name
                  or graphs.ops(got["after"]) <= case["left"])


def reordered(case, got):
    """Whether the results are all there, in another order."""
    values, _ = evaluate(case["nodes"], case["arrays"], case["seed"])
    mine, right = list(map(repr, got["results"])), [repr(values[name]) for name in case["outputs"]]
    return mine != right and sorted(mine) == sorted(right)


class Passes(Check):
    exercise = "17.2"
    tolerance = 0.0
    signatures = [
        when("the list that was passed in is another one after the call: a pass makes a new list",
             lambda case, got: wrong_only(case, got, "given") or wrong_only(case, got, "wanted")),
        when("all arguments are gone: something is remembered from one graph to the next, in a default argument or "
             "beside the functions, and this graph's names were in it", lambda case, got: len(lost(case, got)) == len(
                 case["arrays"])),
        when("an argument that nobody uses was left out: who calls the graph still passes it, and all arguments behind "
             "it are taken for others", lambda case, got: lost(case, got) and not lost(case, got) & used(case)),
        when("two arguments were taken for one: both have the op “argument” and no inputs, and still aren't the same",
             lost),
        when(lambda case, got: f"an output of “{case['graph']}” was left out: {got['results']}. Outputs are needed, "
                               "whether or not an op uses them; and where one was left out as superfluous, the outputs "
                               "must name what stands for it", lambda case, got: "given back" in got["results"]),
        *(when(sentence, only_in(names)) for names, sentence in traps.MISTAKES),
        when(lambda case, got: f"“{case['graph']}” has {len(case['outputs'])} outputs, and yours "
                               f"{len(got['results'])}. Two of them may be the same value, and each is given",
             lambda case, got: not malformed(case, got) and len(got["results"]) != len(case["outputs"])),
        when("the outputs come in another order than the caller's", lambda case, got: reordered(case, got)),
        when(lambda case, got: f"what comes out for “{case['graph']}” is no graph: {got['results']}. Where a node "
                               "goes, the inputs of all nodes behind it and the outputs must name what stands for "
                               "it", malformed),
        when(lambda case: f"“{case['graph']}” gives something else than before; each pass must keep results to the "
                          "last bit, the sign of a zero, and the dtype", lambda case, got: True),
    ]
    demands = [left(name, sentence) for name, (_, _, _, sentence) in traps.PASSES.items() if sentence] + [
        demand(lambda case, got: f"right, but “{case['graph']}” has {graphs.ops(got['after'])} ops left; "
                                 f"{case['left']} will do", lambda case, got: graphs.ops(got["after"]) <= case["left"]),
        demand(lambda case, got: f"right, but a node of “{case['graph']}” has another shape or dtype than its values",
               lambda case, got: not any(found_in(got["after"], case["arrays"], what) for what in (3, 4))),
    ]

    def cases(self, rng, ranks):
        return traps.pass_cases(rng)

    def truth(self, case):
        values, effects = evaluate(case["nodes"], case["arrays"], case["seed"])
        results = [values[name] for name in case["outputs"]]
        return {"results": results, "minus": [minus(x) for x in results], "dtypes": [str(x.dtype) for x in results],
                "effects": effects, "given": case["nodes"], "wanted": case["outputs"]}


def minus(x):
    """Which elements have a minus, those of zeros among them."""
    return (np.copysign(1.0, x) < 0) & ~np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)


def wrong_only(case, got, name):
    """Whether this output is not what it was, whatever else is wrong."""
    if name == "wanted":
        return list(got[name]) != list(case["outputs"])
    return [node[0] for node in got[name]] != [node[0] for node in case["nodes"]]


# ---------------------------------------------------------------- 17.3

ITEM = {"float32": 4, "float64": 8, "bool": 1}


def in_bytes(node):
    return math.prod(node[3]) * ITEM[node[4]]


def moved(case, reads=set, inner=False, outputs=True, size=in_bytes, spread=False, writes=True, given=True, own=False,
          once=False, each=False, twice=False, back=False):
    """The bytes of each partition, array by array. The keywords are mistakes."""
    if "source" in case:
        return {"bytes": []}
    made, needs = {node[0]: node for node in case["nodes"]}, traps.reads_of(case["nodes"])
    totals = []
    for kernels in case["partitions"]:
        total, seen = sum(size(made[x]) for x in case["outputs"] if back and made[x][1] == "argument"), set()
        for kernel in kernels:
            taken = reads(x for name in kernel for x in needs[name] if (own or x not in kernel) and x not in seen and (
                given or made[x][1] != "argument"))
            seen |= set(taken) if once else set()
            for x in taken:
                shape = max((made[name][3] for name in kernel), key=math.prod) if spread else made[x][3]
                total += size([*made[x][:3], shape, made[x][4]])
            for name in kernel:
                others = sum(any(name in needs[x] for x in other) for other in kernels if other is not kernel)
                wanted = outputs and name in case["outputs"]
                if writes and (inner or others or wanted):
                    total += size(made[name]) * (others + wanted if each else 1 + (twice and wanted))
        totals.append(total)
    return {"bytes": totals}


def complains(kind, sentence):
    """A demand that the kernels be free of this fault; sentence has a place for what it is about."""
    def said(case, got):
        about, graph = traps.complaint(got["kernels"], nodes_of(case, got))[1], case.get("graph", "the layer")
        return f"the bytes are right, but not the kernels: in “{graph}” " + sentence.format(", ".join(about))
    return demand(said, lambda case, got: (traps.complaint(got["kernels"], nodes_of(case, got)) or ("",))[0] != kind)


def nodes_of(case, got):
    return case["nodes"] if "nodes" in case else got["drawn"]["nodes"][1]


LAYER = """def f(x, g, w, v):
    c = x - x.sum(1) / 256
    d = x - x.sum(1) / 256
    n = c / ((d * d).sum(1) / 256 + 1e-5).sqrt() * g
    h = n @ w * 1.0
    t = (0.797885 * (h + 0.044715 * h * h * h)).tanh()
    y = x + (0.5 * h * (1 + t)) @ v
    dead = (y * y).sum(0)
    return (y - y.max(1)).exp() / (y - y.max(1)).exp().sum(1)
"""


class Fusion(Check):
    exercise = "17.3"
    signatures = [
        gives("a kernel that uses an array in several ops reads it several times here: it is in the cache after the "
              "first", lambda case: moved(case, reads=list)),
        gives("what only the kernel itself uses is counted as written: it never leaves the cache. Written is what "
              "another kernel needs, and the outputs", lambda case: moved(case, inner=True)),
        gives("an output that no other kernel needs isn't counted as written: f's caller needs it",
              lambda case: moved(case, outputs=False)),
        gives("an array that broadcasts is counted in the size to which it is stretched: read are its own elements",
              lambda case: moved(case, spread=True)),
        gives("only what is read is counted: a kernel also writes, what others need and what is an output",
              lambda case: moved(case, writes=False)),
        gives("arguments aren't counted where they are read: they come from memory like anything else",
              lambda case: moved(case, given=False)),
        gives("elements are counted, not bytes", lambda case: moved(case, size=lambda node: math.prod(node[3]))),
        gives("every element is counted with 4 bytes: a float64 has 8, a bool 1",
              lambda case: moved(case, size=lambda node: 4 * math.prod(node[3]))),
        gives("what several kernels need is counted as written for each of them: it is written once, and read by each",
              lambda case: moved(case, each=True)),
        gives("an output is counted as written twice", lambda case: moved(case, twice=True)),
        gives("an argument that is an output is counted as written: it is there already, and no kernel writes it",
              lambda case: moved(case, back=True)),
        gives("an array that several kernels read is counted once: each of them reads it from memory",
              lambda case: moved(case, once=True)),
        gives("what a kernel makes itself is counted as read: it is in the cache", lambda case: moved(case, own=True)),
        gives("a bool is counted as a float: it has 1 byte", lambda case: moved(
            case, size=lambda node: math.prod(node[3]) * (ITEM | {"bool": 4})[node[4]])),
        gives("every element is counted with 8 bytes: a float32 has 4, a bool 1",
              lambda case: moved(case, size=lambda node: 8 * math.prod(node[3]))),
        when("the list of nodes is another one after the call",
             lambda case, got: len(got["given"]) != len(case.get("nodes", ()))),
    ]
    demands = [
        complains("lists", "{} isn't a list of lists of names, none empty. (None: no return, or ordered's own None)"),
        complains("ops", "{} is in no kernel, or in two, or no op at all: each op is in just one, and arguments in "
                         "none"),
        complains("alone", "{} are one kernel, and a matmul, a transpose, a random or a check must be alone: it isn't "
                           "one loop over rows with anything else"),
        complains("rows", "{} are one loop, but walk over different numbers of rows. (As many elements isn't enough: "
                          "which row would be in the cache?)"),
        complains("columns", "{} are one loop, but walk over rows of different lengths. Beside each other there may "
                             "only be one length, and one number per row"),
        complains("late", "{} are one kernel, and in it the result of a sum or max over axis 0 is used: it is ready "
                          "when the loop has ended, and not before"),
        complains("cycle", "the kernel of {} needs itself: one of its ops needs what a kernel makes that waits for "
                           "another of its ops. So each of them would have to run before the other"),
        complains("order", "the kernel of {} stands before one that it needs: kernels come in an order to run them in"),
        complains("inside", "{} stands before what it needs in its own kernel: the ops of a kernel are in the order of "
                            "the nodes"),
        *(demand("the kernels can be run, but they are too many: " + sentence, lambda case, got, name=name:
                 case.get("graph") != name or len(got["kernels"]) <= case["most"])
          for name, (*_, sentence) in traps.FUSE.items() if sentence),
        demand(lambda case, got: f"the kernels can be run, but “{case['graph']}” has {len(got['kernels'])}, and "
                                 f"{case['most']} will do",
               lambda case, got: "source" in case or len(got["kernels"]) <= case["most"]),
    ]

    def cases(self, rng, ranks):
        layer = {"source": LAYER, "dtypes": ["float32"] * 4, "shapes": [[512, 256], [1, 256], [256, 1024], [1024, 256]]}
        return [*traps.fuse_cases(rng), layer]

    def truth(self, case):
        return moved(case) | {"given": case.get("nodes", [])}

    def picture(self, runs, path):
        _, got = runs[1][-1]
        return drawing.draw(got, path)


# ---------------------------------------------------------------- 17.4

class Emit(Check):
    exercise = "17.4"
    tolerance = 1e-15
    signatures = tiles.SIGNATURES
    demands = tiles.DEMANDS

    def cases(self, rng, ranks):
        return tiles.cases(rng)

    def truth(self, case):
        return {"problem": None, "results": [tiles.eager(case)] * len(case["tiles"])}

    def picture(self, runs, path):
        case, got = runs[1][-1]
        return drawing.draw_kernel(case, got, path)
