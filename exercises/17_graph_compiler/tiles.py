"""Kernels that 17.4 writes as programs, and the mistakes in such programs."""

import math

import numpy as np

from exercises.frame import demand, gives, when

from .drive import evaluate
from .graphs import build, ops

R, C = 23, 9
# name: (text, shapes of a, b …, outputs, dtype)
KERNELS = {
    "gelu, float32": ("p = mul(a, a); q = mul(p, a); r = mul(q, 0.044715); s = add(a, r); t = mul(s, "
                      "0.7978845608028654); u = tanh(t); v = add(u, 1); w = mul(a, 0.5); x = mul(w, "
                      "v)", [(R, C)], "x", "float32"),
    "gelu, float64": ("p = mul(a, 0.044715); q = add(a, p); r = mul(0.7978845608028654, q); s = tanh(r)", [(R, C)], "s",
                      "float64"),
    "broadcast": ("p = mul(a, b); q = add(p, c); r = mul(q, d); s = sub(r, e); t = div(s, f)",
                  [(R, C), (C,), (1, C), (R, 1), (), (1, 1)], "t", "float64"),
    "as many rows as columns": ("p = mul(a, b); q = add(c, p)", [(C, C), (C,), (1, C)], "q", "float64"),
    "softmax": ("p = max(a, 1); q = sub(a, p); r = exp(q); s = sum(r, 1); t = div(r, s)", [(R, C)], "t s", "float64"),
    "sums last": ("p = mul(a, a); q = sum(p, -1); r = sqrt(q); s = neg(r)", [(R, C)], "s", "float64"),
    "sides": ("p = sub(2, a); q = div(1, p); r = sub(q, a); s = div(a, r); t = add(q, s); u = mul(t, r)",
              [(R, C)], "u q", "float64"),
    "a mask": ("p = greater(a, 0.25); q = greater(b, a); r = mul(p, a); s = mul(q, r)", [(R, C), (1, C)], "s q",
               "float64"),
    "an argument given back": ("p = exp(b)", [(R, C), (R, C)], "b p a", "float64"),
    "one result twice": ("p = exp(a)", [(R, C)], "p a p", "float64"),
    "a row": ("p = mul(a, b); q = add(p, a)", [(1, C), (C,)], "q", "float64"),
    "an unused argument": ("p = exp(c)", [(), (R, C), (R, C)], "p", "float64"),
    "small numbers": ("p = add(a, 1e-05); q = mul(p, 12345678.9); r = sub(q, 1e+20)", [(R, C)], "q r", "float64"),
    "layer norm": ("p = sum(a, 1); q = div(p, 64); r = sub(a, q); s = mul(r, r); t = sum(s, 1); u = div(t, 64); v = "
                   "add(u, 1e-05); w = sqrt(v); x = div(r, w); y = mul(x, b); z = add(y, c)",
                   [(512, 64), (64,), (64,)], "z", "float32"),
}


def cases(rng):
    found = []
    for name, (text, shapes, outputs, dtype) in KERNELS.items():
        arrays = [np.asarray(rng.uniform(0.2, 1.7, shape) * rng.choice([-1.0, 1.0], shape), dtype) for shape in shapes]
        nodes = build(text, arrays)
        made = {node[0]: node for node in nodes}
        rows = made[outputs.split()[0]][3][0]
        found.append({"kernel": name, "nodes": nodes, "outputs": outputs.split(), "arrays": arrays,
                      "tiles": [4, rows, 1, rows + 5] if rows < 512 else [5, 512, 1, 8, 64],
                      "results": [[made[x][3], made[x][4]] for x in outputs.split()]})
    return found


def eager(case, nodes=None):
    """The right results, op by op on whole arrays."""
    values = evaluate(nodes or case["nodes"], case["arrays"])[0]
    return [values[name] for name in case["outputs"]]


def with_numbers(change):
    """The results with other numbers in the place of constants, in the outputs' own dtypes."""
    def of(case):
        nodes = [[name, op, [change(x) if isinstance(x, float) or isinstance(x, int) and op not in ("sum", "max") else x
                             for x in inputs], shape, dtype] for name, op, inputs, shape, dtype in case["nodes"]]
        with np.errstate(all="ignore"):
            found = eager(case, nodes)
        found = [x.astype(dtype) for x, (_, dtype) in zip(found, case["results"], strict=True)]
        return {"problem": None, "results": [found] * len(case["tiles"])}
    return of


def swapped(case):
    """A number always on the right."""
    nodes = [[name, op, sorted(inputs, key=lambda x: not isinstance(x, str)), shape, dtype]
             for name, op, inputs, shape, dtype in case["nodes"]]
    return {"problem": None, "results": [eager(case, nodes)] * len(case["tiles"])}


def unwritten(case, got, begin):
    """For each size of tiles, whether the rows that weren't written are those from begin(rows, tile) on."""
    for tile, results in zip(case["tiles"], got["results"], strict=True):
        for result, right in zip(results, eager(case), strict=True):
            if right.dtype.kind == "f":
                rows = np.isnan(result).all(axis=1)
                if np.argmax(rows) != begin(len(rows), tile) % len(rows) or not np.array_equal(
                        result[~rows], right[~rows]):
                    return False
    return True


def says(*texts):
    return lambda case, got: got["problem"] is not None and any(text in got["problem"] for text in texts)


def width(case):
    """Bytes of the widest row."""
    return max(math.prod(node[3][1:]) for node in case["nodes"] if node[1] != "argument") * 8


def most(case):
    return sum(math.prod(walk(case, node)) for node in case["nodes"] if node[1] != "argument")


def walk(case, node):
    made = {other[0]: other for other in case["nodes"]}
    return made[node[2][0]][3] if node[1] in ("sum", "max") else node[3]


SIGNATURES = [
    when("the kernel isn't text: emit gives the source, it doesn't run anything",
         says("exec() arg 1 must be")),
    when("(rows, 1) isn't cut into tiles: a tile of 4 rows meets all numbers, where it has 4 of its own",
         lambda case, got: case["kernel"] == "broadcast" and says(f"({R},1)")(case, got)),
    when("a vector of as many elements as there are rows is cut into tiles: a vector broadcasts over the rows, however "
         "long it is. What has rows is a matrix",
         lambda case, got: case["kernel"] == "as many rows as columns"),
    when("an array that broadcasts over the rows is cut into tiles as well: of (columns,), (1, columns) and () each "
         "tile needs all. Only a matrix with as many rows as the loop is cut",
         lambda case, got: got["problem"] is not None and case["kernel"] in (
             "broadcast", "as many rows as columns", "a mask", "an unused argument", "a row", "layer norm")
         and says("broadcast", "too many indices", "scalar")(case, got)),
    when(lambda case, got: f"the kernel of “{case['kernel']}” can't be run: {got['problem']}",
         lambda case, got: got["problem"] is not None),
    when("results holds other arrays after the call, or tiles in the place of whole arrays: the kernel fills the "
         "arrays that it is given, results[k][here] = …",
         lambda case, got: any(len(r) != len(e) for rs in got["results"]
                               for r, e in zip(rs, eager(case), strict=True))),
    when("of an output that is given twice only one array is filled: there is one for each, and both are the caller's",
         lambda case, got: case["kernel"] == "one result twice"),
    when("only the first output is written into results: there is an array for each",
         lambda case, got: len(case["outputs"]) > 1 and all(
             np.array_equal(rs[0], eager(case)[0]) and (
                 np.isnan(rs[-1]) | (rs[-1] == 0)).all() for rs in got["results"])),
    when("the last tile is lost where the rows aren't a multiple of it: range(0, rows, tile) has a last start whose "
         "tile is shorter, and a slice ends by itself",
         lambda case, got: unwritten(case, got, lambda rows, tile: rows // tile * tile)),
    when("only the first tile is done", lambda case, got: unwritten(case, got, lambda rows, tile: min(tile, rows))),
    gives("a constant that Python would keep at the array's dtype has become a float64 here, and float32 arrays with "
          "it. A plain number leaves the dtype alone, np.float64(…) doesn't",
          with_numbers(lambda x: np.float64(x))),
    gives("constants are written with 6 digits: repr gives as many as it takes to read the same number back",
          with_numbers(lambda x: float(f"{x:g}"))),
    gives("constants are whole numbers here", with_numbers(lambda x: int(x))),
    gives("a number has changed sides: 2 - a was written as a - 2", swapped),
    when("expressions were put into each other without parentheses: a - b in the place of x in y * x is y * a - b",
         lambda case, got: any(f" {node[0]} =" not in got["source"] for node in case["nodes"])),
    when(lambda case, got: f"the kernel of “{case['kernel']}” gives other numbers than its ops one by one: print the "
                           "source, and read it beside the nodes",
         lambda case, got: not any(np.isnan(x).any() for results in got["results"] for x in results)),
]
DEMANDS = [
    demand(lambda case, got: f"right, but {got['written'][0]} isn't what it was: the kernel of “{case['kernel']}” "
                             "writes into its arguments, which are the caller's", lambda case, got: not got["written"]),
    demand(lambda case, got: f"right, but in “{case['kernel']}” an op gives {max(c[1] for c in got['counts'][:1])} "
                             f"elements at a time with tiles of {case['tiles'][0]} rows: it is done on the whole "
                             "array, outside of the loop or without [here], and memory is what tiles are to save",
           lambda case, got: all(c[1] <= tile * width(case) // 8 for c, tile in zip(got["counts"], case["tiles"],
                                                                                    strict=True))),
    demand(lambda case, got: f"right, but “{case['kernel']}” computes {max(c[0] for c in got['counts'])} elements, "
                             f"where {most(case)} would do: an op is done several times, or a tile twice",
           lambda case, got: all(c[0] <= most(case) for c in got["counts"])),
    demand(lambda case, got: f"right, but “{case['kernel']}” holds {got['counts'][0][2]} bytes of temporaries at a "
                             "time; the tiles of its ops are less: something of every tile is kept",
           lambda case, got: all(c[2] <= (ops(case["nodes"]) + 1) * tile * width(case)
                                 for c, tile in zip(got["counts"], case["tiles"], strict=True))),
]
