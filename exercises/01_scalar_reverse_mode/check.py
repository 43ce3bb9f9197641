"""What the answers of chapter 1 are tried with, and the mistakes that are known."""

import math

import numpy as np

from exercises.frame import Check, demand, gives, when

# ---------------------------------------------------------------- 01.1


def local_derivatives(a, b, n):
    """{expression: (value, {parent: derivative})}, by hand."""
    t, e = math.tanh(a), math.exp(a)
    return {
        "a + b": (a + b, {"a": 1.0, "b": 1.0}),
        "a - b": (a - b, {"a": 1.0, "b": -1.0}),
        "a * b": (a * b, {"a": b, "b": a}),
        "a / b": (a / b, {"a": 1 / b, "b": -a / b**2}),
        "a ** n": (a**n, {"a": n * a ** (n - 1)}),
        "a.tanh()": (t, {"a": 1 - t * t}),
        "a.exp()": (e, {"a": e}),
        "a * a": (a * a, {"a": 2 * a}),
        "n - a": (n - a, {"a": -1.0}),
        "a / n": (a / n, {"a": 1 / n}),
    }


def mistaken(**wrong):
    """A hypothesis: these local derivatives, {expression's key: function of (a, b, n) -> {parent: derivative}}."""
    texts = {"sub": "a - b", "rsub": "n - a", "mul": "a * b", "square": "a * a", "div": "a / b", "by_n": "a / n",
             "pow": "a ** n", "tanh": "a.tanh()", "exp": "a.exp()"}

    def outputs(case):
        known = {text: dict(slopes) for text, (_, slopes) in local_derivatives(**case).items()}
        for key, slopes in wrong.items():
            known[texts[key]] |= slopes(**case)
        return {"values": {text: value for text, (value, _) in local_derivatives(**case).items()}, "local": known,
                "operands": {"a": case["a"], "b": case["b"]}}
    return outputs


def unconnected(case, got):
    """Some expression's result has no way back to an operand."""
    known = local_derivatives(**case)
    return any(slope == 0.0 != known[text][1][name] for text, slopes in got["local"].items()
               for name, slope in slopes.items())


def nearly(case, got):
    """The numbers are right, and of the derivatives only the first digits are."""
    return all(np.isclose(got["values"][text], value, rtol=1e-12) and
               all(np.isclose(got["local"][text][name], slope, rtol=1e-3, atol=1e-3) for name, slope in slopes.items())
               for text, (value, slopes) in local_derivatives(**case).items())


def operand_changed(case, got):
    return any(got["operands"][name] != case[name] for name in "ab")


class Value(Check):
    exercise = "01.1"
    tolerance = 1e-12       # of 1 − t² at 3 a digit less is right; of a difference quotient 11 are, at the most
    signatures = [
        when("an operation changes one of its operands: a.data or b.data is another number afterwards, and whatever "
             "uses it next is wrong. Every operation makes a new Value", operand_changed),
        gives("the derivative of a − b by b has the wrong sign: when b grows, a − b falls",
              mistaken(sub=lambda a, b, n: {"b": 1.0}, rsub=lambda a, b, n: {"a": 1.0})),
        gives("the derivatives of a·b are exchanged: by a it is b, and by b it is a",
              mistaken(mul=lambda a, b, n: {"a": a, "b": b})),
        gives("the derivatives of a·b are 1, as for a sum: when a grows by 1, a·b grows by b",
              mistaken(mul=lambda a, b, n: {"a": 1.0, "b": 1.0}, square=lambda a, b, n: {"a": 2.0})),
        gives("the derivative of a/b by b lacks its minus: it is −a/b²",
              mistaken(div=lambda a, b, n: {"b": a / b**2})),
        gives("the derivative of a/b by b lacks the factor a: it is −a/b²",
              mistaken(div=lambda a, b, n: {"b": -1 / b**2})),
        gives("the derivative of a/b by b must have b², not b, below the line",
              mistaken(div=lambda a, b, n: {"b": -a / b})),
        gives("the derivative of a/b by a is 1/b, not b", mistaken(div=lambda a, b, n: {"a": b},
                                                                   by_n=lambda a, b, n: {"a": n})),
        gives("the derivative of aⁿ lacks the factor n", mistaken(pow=lambda a, b, n: {"a": a ** (n - 1)})),
        gives("the derivative of aⁿ has the exponent n; it must be n − 1",
              mistaken(pow=lambda a, b, n: {"a": n * a**n})),
        gives("n · a ** n - 1 is n · aⁿ, less 1: the exponent n − 1 needs brackets",
              mistaken(pow=lambda a, b, n: {"a": n * a**n - 1})),
        gives("the derivative of tanh is 1 − t² with t the result, not the input",
              mistaken(tanh=lambda a, b, n: {"a": 1 - a * a})),
        gives("the derivative of tanh is 1 − t², not 1 − t", mistaken(tanh=lambda a, b, n: {"a": 1 - math.tanh(a)})),
        *[gives("the derivative of tanh is 1 − t²", mistaken(tanh=slope)) for slope in (
            lambda a, b, n: {"a": 1 + math.tanh(a) ** 2}, lambda a, b, n: {"a": (1 - math.tanh(a)) ** 2})],
        *[gives("exp is its own derivative", mistaken(exp=slope)) for slope in (
            lambda a, b, n: {"a": a}, lambda a, b, n: {"a": 1.0}, lambda a, b, n: {"a": a * math.exp(a)})],
        gives("the power rule doesn't hold for exp: it is its own derivative",
              mistaken(exp=lambda a, b, n: {"a": a * math.exp(a - 1)})),
        when("the derivatives are right to some digits only, as a difference quotient is, (f(a + h) − f(a − h)) / 2h. "
             "The formula, which is as short, is right to all of them", nearly),
        when("a result doesn't know one of its operands, and the derivative by it comes out as 0: what is made of "
             "other.data is a plain number, a constant. The parents are Values", unconnected),
    ]

    def cases(self, rng, ranks):
        found = [{"a": float(sign * rng.uniform(0.4, 1.6)), "b": float(rng.uniform(0.5, 2.5) * other), "n": n}
                 for sign, other, n in ((1, 1, 3), (-1, 1, 5), (1, -1, -2), (-1, -1, 4))]
        return [*found, {"a": float(rng.uniform(3, 3.4)), "b": 0.7, "n": 1.5}, {"a": 0.0, "b": found[0]["b"], "n": 2}]

    def truth(self, case):
        return mistaken()(case)


# ---------------------------------------------------------------- 01.2

def below(parents):
    """Numbers of the nodes that the last one was made from, itself included."""
    found, stack = set(), [len(parents) - 1]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += parents[node]
    return found


def parents_first(case, got):
    place = {name: i for i, name in enumerate(got["order"])}
    return all(place[parent] < place[name] for name in got["order"] for parent in case["parents"][name])


class Order(Check):
    exercise = "01.2"
    demands = [
        demand("the graph is changed: some node has other parents afterwards, and whoever walks it next finds less. "
               "Read node.parents, and leave it as it is", lambda case, got: got["graph"] == case["parents"]),
        demand("the nodes come as a generator, a set or a view of a dict: whoever walks them backwards, or twice, "
               "needs a list", lambda case, got: got["listed"]),
        demand("a second call with the same root gives another list: something is left from the first, in a default "
               "argument (it is made once, for all calls), a global name, or the nodes themselves",
               lambda case, got: got["order"] == got["again"]),
        demand("the result isn't a list of nodes", lambda case, got: all(isinstance(n, int) for n in got["order"])),
        demand("the nodes without parents are missing: root was computed from them too, and for them gradients "
               "are wanted", lambda case, got: len(case["parents"]) == 1 or any(not case["parents"][name]
                                                                                for name in got["order"])),
        demand("root itself is missing from the list",
               lambda case, got: len(case["parents"]) - 1 in got["order"]),
        demand("a node is there more than once: two paths lead to it, and it would pass its gradient on twice",
               lambda case, got: len(set(got["order"])) == len(got["order"])),
        demand("nodes are missing: root was computed from them too (follow every parent, not only the first)",
               lambda case, got: set(got["order"]) >= below(case["parents"])),
        demand("the list begins with root: it is the other way round, parents come first",
               lambda case, got: len(got["order"]) == 1 or got["order"][0] != len(case["parents"]) - 1),
        demand("a node comes before one of its parents. It looks right in a chain; it goes wrong where a short and a "
               "long way lead to the same node", parents_first),
        demand("right, but by recursion, with Python's limit raised: that limit is there because the stack isn't made "
               "for it. A list that is used as a stack has no limit", lambda case, got: not got["deeper"]),
    ]

    def cases(self, rng, ranks):
        unequal_ways = [[], [0], [1], [2], [0, 3], [4, 1], [5, 0]]
        mirrored = [parents[::-1] for parents in unequal_ways]
        tangled = [sorted({int(i) for i in rng.integers(max(0, k - 6), k, 3)}) if k > 2 else [] for k in range(40)]
        ladder = [[]] + [[k, k] for k in range(60)]                       # 2⁶⁰ paths
        chain = [[]] + [[k] for k in range(10_000)]
        return [{"parents": parents} for parents in
                ([[]], [[], [], [0, 1]], unequal_ways, mirrored, tangled, ladder, chain)]

    def truth(self, case):
        return {}      # many orders are right: the demands say what makes one so


# ---------------------------------------------------------------- 01.3

SLOPES = {    # op: (value, slopes) as functions of the parents' numbers
    "add": (lambda a, b: a + b, lambda a, b: (1.0, 1.0)),
    "sub": (lambda a, b: a - b, lambda a, b: (1.0, -1.0)),
    "mul": (lambda a, b: a * b, lambda a, b: (b, a)),
    "div": (lambda a, b: a / b, lambda a, b: (1 / b, -a / b**2)),
    "tanh": (math.tanh, lambda a: (1 - math.tanh(a) ** 2,)),
    "exp": (math.exp, lambda a: (math.exp(a),)),
}


def evaluate(case):
    """(value, parents, slopes) of every node."""
    values = list(case["leaves"])
    parents, slopes = [()] * len(values), [()] * len(values)
    for op, *which in case["program"]:
        numbers = [values[i] for i in which]
        values.append(SLOPES[op][0](*numbers))
        parents.append(tuple(which))
        slopes.append(SLOPES[op][1](*numbers))
    return values, parents, slopes


def forward_derivatives(case, root):
    """∂root/∂node for every node, by forward mode: one pass per node, in which only this one moves."""
    _, parents, slopes = evaluate(case)
    found = []
    for moved in range(root + 1):
        tangent = [0.0] * (root + 1)
        tangent[moved] = 1.0
        for node in range(moved + 1, root + 1):
            tangent[node] = sum(s * tangent[p] for p, s in zip(parents[node], slopes[node], strict=True))
        found.append(tangent[root])
    return found


def reverse(case, root, order, grads, add=True, upstream="grad", first_parent=False, clear="all",
            backwards=True, merged=False, begin_at_1=True, stop=False):
    """The learner's loop with one thing wrong, in the learner's order. grads: what was there before."""
    values, parents, slopes = evaluate(case)
    for node in {"all": order, "root": [root], "none": [], "leaves": [i for i in order if not parents[i]],
                 "others": [i for i in order if parents[i]], "walk": [root],
                 "below": [i for i in order if i != root]}[clear]:
        grads[node] = 0.0
    begin = 1.0 if begin_at_1 else values[root]
    grads[root] = grads[root] + begin if clear in ("all", "root", "none", "walk", "below") else begin
    for node in order[::-1] if backwards else order:
        if stop and grads[node] == 0:
            break
        pairs = list(zip(parents[node], slopes[node], strict=True))[:1 if first_parent else None]
        if clear == "walk":
            for parent, _ in pairs:
                grads[parent] = 0.0
        for parent, slope in dict(pairs).items() if merged else pairs:
            handed = slope * {"grad": grads[node], "data": values[node], "nothing": 1.0}[upstream]
            grads[parent] = grads[parent] + handed if add else handed


def like(**mistake):
    """Whether backward, called as drive.py does, left what this mistake leaves."""
    def predicate(case, got):
        last = len(got["values"]) - 1
        grads = [0.0] * (last + 1)
        for name, root, order in zip(("grads", "again", "second"), (last, last, case["second"]), got["orders"],
                                     strict=True):
            reverse(case, root, order, grads, **mistake)
            if not np.allclose(grads, got[name], rtol=1e-8, atol=0):
                return False
        return True
    return predicate


def shared(case, got):
    """Whether there are nodes of equal numbers, and all of them have equal gradients."""
    first, values = got["grads"], got["values"]
    alike = [(i, j) for i, x in enumerate(values) for j in range(i) if x == values[j]]
    return alike and all(first[i] == first[j] for i, j in alike)


def after_calls(case):
    """The gradients after each of drive.py's calls."""
    last, second = len(case["leaves"]) + len(case["program"]) - 1, case["second"]
    first, other = forward_derivatives(case, last), forward_derivatives(case, second)
    return {"grads": first, "again": first, "second": other + first[second + 1:], "twice": [2 * g for g in first]}


def only_the_other_result(case, got):
    """Whether all calls but the last leave what they should."""
    return all(np.allclose(got[name], grads, rtol=1e-8, atol=0) for name, grads in after_calls(case).items()
               if name != "twice")


def first_is_right(case, got):
    return np.allclose(got["grads"], forward_derivatives(case, len(got["values"]) - 1), rtol=1e-8, atol=0)


TOUR = [("mul", 0, 1), ("add", 3, 0), ("tanh", 4), ("sub", 5, 2), ("mul", 6, 6), ("div", 7, 2), ("exp", 5),
        ("add", 8, 9)]
PLACES = [(0, 1.2), (0, -0.6), (3, 2.3), (1, 0.2), (2, 0.8), (3, 0.8), (4, 1.1), (5, 1.1), (6, 1.1), (4.5, -0.4),
          (7, 0.3)]     # of the nodes of TOUR in the picture


class Backward(Check):
    exercise = "01.3"
    tolerance = 1e-8
    signatures = [
        when("some node's .data is another number afterwards: backward sets .grad, and leaves the rest as it was",
             lambda case, got: not np.allclose(got["values"], evaluate(case)[0], rtol=1e-8, atol=0)),
        when("every .grad is still 0, root's too, which is 1 by itself: set it after the others were set to 0. And "
             ".grad is what counts, not what backward returns", lambda case, got: not any(got["grads"])),
        when("a node that is used twice keeps only what it was handed last: its gradient is the sum (+=, not =)",
             like(add=False)),
        when("what comes from above is ignored: each parent gets the local derivative alone, not times node.grad",
             like(upstream="nothing")),
        when("a node hands on its .data times the local derivative; it is its .grad that is handed on",
             like(upstream="data")),
        when("a node's .grad is set to 0 during the walk: what another node has handed it is lost. All are set to 0 "
             "before the first hands anything on", like(clear="walk")),
        when("only the first parent of each node gets anything", like(first_parent=True)),
        when("root's gradient by itself is 1, whatever its value", like(begin_at_1=False)),
        when("stale gradients: the first call is right, and the second adds to what it left behind",
             like(clear="none")),
        when("stale gradients: root begins at 1 again, but the other nodes still hold the last call's",
             like(clear="root")),
        when("stale gradients: root's own .grad isn't set to 0 before 1 is added, and holds the last call's",
             like(clear="below")),
        *[when("stale gradients: a later call finds the last one's, for not all are set to 0 before it. Leaves and "
               "the nodes between them and root need it alike", like(clear=which)) for which in ("leaves", "others")],
        when("a node that is twice the parent of one other, as in b·b, is handed one number only: a dict or a set of "
             "the parents holds it once. Walk the two tuples side by side", like(merged=True)),
        when("nothing gets beyond root's own parents: the nodes are walked in the wrong direction",
             like(backwards=False)),
        when("a node with the gradient 0 ends the walk: it has nothing to hand on, but those behind it may have",
             like(stop=True)),
        when("a root without parents keeps the gradient 0: by itself it is 1 there, too",
             lambda case, got: case["second"] == 0 and got["second"][0] == 0),
        when("two nodes that hold the same number share one gradient: they are two, and each has a .grad of its own",
             shared),
        when("stale gradients: backward of another result, which shares nodes with the first, finds what that one has "
             "left. Whatever root's own .grad was, all others begin at 0",
             only_the_other_result),
        when("the first call is right and a later one isn't: it found the graph changed. Set .grad alone; .parents and "
             ".local are needed again", first_is_right),
    ]

    def cases(self, rng, ranks):
        def leaves(n):
            return [float(x) for x in rng.uniform(0.5, 1.5, n)]
        tangled = [("tanh", 2), *[(str(rng.choice(["add", "sub", "mul"])), k + 3, k if k < 2 else int(other))
                                  for k, other in enumerate(rng.integers(0, np.arange(3, 12)))]]
        ladder = [("add", k, k) for k in range(40)]
        # Two equal numbers; and what a difference of equals hands on is 0, where others still have to hand on more.
        alike = leaves(1) * 2 + leaves(1)
        return [{"leaves": leaves(3), "program": TOUR, "second": 6},
                {"leaves": leaves(3), "program": tangled, "second": 7},
                {"leaves": leaves(1), "program": ladder, "second": 20},
                {"leaves": alike, "program": [("tanh", 0), ("mul", 3, 2), ("sub", 4, 4), ("add", 5, 3), ("mul", 6, 1)],
                 "second": 0}]

    def truth(self, case):
        return {"values": evaluate(case)[0], **after_calls(case)}

    def picture(self, runs, path):
        case, got = runs[1][0]
        return draw_graph(case, got, path)


def draw_graph(case, got, path):
    """The graph of a run, from the leaves to the result: values in the boxes, gradients below them."""
    from exercises.frame.pictures import COLORS, canvas, save
    _, parents, slopes = evaluate(case)
    figure, axes = canvas(size=(11, 4.8))
    names = ["a", "b", "c", *(op for op, *_ in case["program"])]
    for node, mine in enumerate(parents):
        for which, (parent, slope) in enumerate(zip(mine, slopes[node], strict=True)):
            begin, end = np.array(PLACES[parent]), np.array(PLACES[node])
            twice = -0.35 if which and parent == mine[0] else 0.35 if mine.count(parent) == 2 else 0.0
            axes.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": "#999999", "shrinkA": 26,
                                                      "shrinkB": 26, "connectionstyle": f"arc3,rad={-twice}"})
            across = np.array([begin[1] - end[1], end[0] - begin[0]]) / np.hypot(*(end - begin))
            place = 0.5 * (begin + end) + 0.5 * twice * across      # the middle of the arrow
            axes.text(*place, f"× {slope:.2f}".replace("-", "−"), color="#777777", fontsize=9, ha="center",
                      va="center", bbox={"color": "white", "pad": 1})
    for node, place in enumerate(PLACES):
        axes.text(*place, f"{names[node]}\n{got['values'][node]:.3f}".replace("-", "−"), ha="center", va="center",
                  fontsize=10, color="white", bbox={"boxstyle": "round,pad=0.45",
                                                    "color": COLORS[0 if parents[node] else 2]})
        axes.text(place[0], place[1] - 0.42, f"{got['grads'][node]:.3f}".replace("-", "−"), ha="center", va="center",
                  fontsize=10, color=COLORS[1], fontweight="bold")
    axes.set_xlim(-0.5, 7.5)
    axes.set_ylim(-1.1, 2.8)
    axes.set_axis_off()
    save(figure, path)
    return "your graph: the numbers in the boxes, local derivatives on the arrows, the gradients that came back below"
