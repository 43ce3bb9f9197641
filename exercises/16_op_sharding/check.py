"""What the answers of chapter 16 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.comparing import same

from . import cuts, drawing, losses, tables, worlds
from .cuts import along, first_longer, partial, pieces, reversed_parts, strided, times_zero
from .mistakes import BETWEEN, FORWARD, PLACES, last_alone
from .tables import share

# ---------------------------------------------------------------- 16.1

class Layouts(Check):
    exercise = "16.1"
    signatures = [
        gives(lambda case: f'"P": every rank has all of x, and the sum is {case["size"]} times x: addends were asked '
                           "for, not copies",
              partial(cut=lambda x, size: [x] * size)),
        gives('"P" taken for "R": that is one rank\'s addend, and the array is the sum of all',
              partial(join=lambda parts: parts[0])),
        gives('"P" taken for "R": that is one rank\'s addend, and the array is the sum of all',
              partial(join=lambda parts: parts[-1])),
        gives('"P": the mean of the addends; their sum is the array', partial(join=lambda p: sum(p) / len(p))),
        gives('"P" taken for a split: the addends lie on each other, not beside each other',
              partial(join=lambda p: np.concatenate(p, 0))),
        gives('"P": an equal share of every element on each rank adds up to x as well; asked for was the way '
              "that takes no arithmetic and rounds nothing: x on rank 0, zeros elsewhere",
              partial(cut=lambda x, size: [x / size] * size)),
        gives('"P": x · 0 is nan where x is inf or nan; zeros are made by themselves', partial(cut=times_zero)),
        gives('"P": x on rank 0 was asked for, and zeros on the others; here another rank has it',
              partial(cut=lambda x, size: [np.zeros_like(x)] * (size - 1) + [x])),
        gives("the places n·r/N are rounded to the nearest number; n·r//N is rounded down",
              pieces(lambda n, size: [round(n * rank / size) for rank in range(size + 1)])),
        gives("n // N elements each, and the rest of the division is lost: uneven lengths must be shared too",
              pieces(lambda n, size: [rank * (n // size) for rank in range(size + 1)])),
        gives("n // N elements each, and the last rank has all the rest: with 3 ranks and 5 elements that is 1, 1, 3; "
              "from n·r//N to n·(r+1)//N nobody has more than one element more",
              pieces(lambda n, size: [*(rank * (n // size) for rank in range(size)), n])),
        gives("a split that is as good (np.array_split's: the first ranks have the longer parts), but another one: who "
              "sends and who receives must mean the same. Rank r has n·r//N up to n·(r+1)//N",
              pieces(first_longer)),
        gives("the elements are dealt out like cards, every N-th to a rank; a rank's part is a stretch", strided),
        gives("cut, or joined, along axis 0 whatever the placement says", along(lambda axis, ndim: 0)),
        gives("cut, or joined, along the wrong axis: S0 is along the first, S1 along the second",
              along(lambda axis, ndim: (axis + 1) % ndim)),
        gives("the parts are joined in the wrong order: rank 0's comes first", reversed_parts),
    ]
    demands = [demand(lambda case, got, rule=rule: rule(case, got),
                      lambda case, got, rule=rule, name=name: name not in got or not rule(case, got))
               for name, rules in (("products", tables.PRODUCT_RULES), ("moves", tables.MOVE_RULES)) for rule in rules]
    demands.append(demand(cuts.strangely_typed, lambda case, got: not cuts.strange_types(case, got)))

    def cases(self, rng, ranks):
        def array(*shape, dtype=np.float64):
            return rng.standard_normal(shape).astype(dtype)
        whole = [{"x": array(*shape, dtype=dtype), "placement": placement, "size": size}
                for shape, dtype, placement, size in [
                    ((5, 8), np.float64, "S0", 3), ((5, 8), np.float64, "S1", 3), ((4, 6, 3), np.float32, "S1", 2),
                    ((3, 2, 11), np.float64, "S2", 4), ((2, 3), np.float64, "S0", 3), ((7,), np.float64, "S0", 1),
                    ((3, 4), np.float32, "R", 3), ((3, 4), np.float32, "P", 3), ((2, 5), np.float64, "P", 2),
                    ((2, 5), np.float64, "P", 1)]]
        whole[-3]["x"][1, 2] = np.inf
        joins = [{"parts": tables.parts(rng, array(*shape, dtype=dtype), placement, size), "placement": placement}
                 for shape, dtype, placement, size in [
                     ((5, 8), np.float64, "S0", 3), ((4, 4, 3), np.float64, "S1", 4), ((3, 2, 11), np.float32, "S2", 3),
                     ((4, 3), np.float64, "R", 2), ((3, 2), np.float32, "R", 1), ((4, 3), np.float64, "P", 3),
                     ((2, 3), np.float64, "S0", 4)]]
        # Whole numbers: in whatever order they are added, float32 rounds nothing.
        joins += [{"parts": list(np.rint(9 * array(4, 3, 5)).astype(dtype)), "placement": "P"}
                  for dtype in (np.float32, np.int16)]
        moves = [{"nbytes": 8 * size * size * int(rng.integers(2, 99)), "size": size} for size in (3, 2, 4, 8)]
        return [*whole, *joins, {"table": "of a product"}, *moves]

    def truth(self, case):
        if "x" in case:
            return {"parts": tables.parts(None, case["x"], case["placement"], case["size"])
                    if case["placement"] != "P" else
                    [case["x"] if rank == 0 else np.zeros_like(case["x"]) for rank in range(case["size"])]}
        return {"joined": tables.joined(case["parts"], case["placement"])} if "parts" in case else {}


# ---------------------------------------------------------------- both layers

def ys_are(hypothesis):
    """Signature's predicate: every rank's outputs are those. hypothesis(case) → [y], or None."""
    def holds(case, got):
        expected = hypothesis(case) if "xs" in case[0] else None
        return expected is not None and all(same(y, e, 1e-9) for rank in got
                                            for y, e in zip(rank["ys"], expected, strict=True))
    return holds


def overwritten(case, got):
    return any(np.array_equal(y, z) for rank in got for y, z in zip(rank["ys"], rank["ys"][1:], strict=False))


def unlike(case, got):
    return any(not same(y, first, 1e-9) for rank in got for y, first in zip(rank["ys"], got[0]["ys"], strict=True))


def only_behind(got, right, behind):
    """Whether nothing is wrong but the gradients by x and by the params of these names."""
    return all(same(y, e, 1e-9) for rank, truth in zip(got, right, strict=True)
               for y, e in [*zip(rank["ys"], truth["ys"], strict=True),
                            *((one[name], other[name]) for one, other in zip(rank["grads"], truth["grads"], strict=True)
                              for name in other if name not in behind)])


def steps(case):
    return len(case[0]["xs"]) if "xs" in case[0] else 0


def reduced(got):
    """Bytes of the all-reduces of each rank, in order."""
    return [[call["bytes"] for call in rank.calls] for rank in got]


def wanted(case):
    """…and what is enough: y of every step, then dx."""
    return [a.nbytes for a in case[0]["dys"]] + [a.nbytes for a in reversed(case[0]["xs"])] if steps(case) else []


def in_full(case, got):
    return not steps(case) or any(reduced(got))


FEW = [
    demand("right, but nothing is sent: then every rank has worked out the whole layer, from all of its parameters",
           in_full),
    demand(lambda case, got: f"right, but with {len(got[0].calls) / steps(case):g} all-reduces per forward and "
                             "backward; two are enough: of y, and of the gradient by x",
           lambda case, got: not steps(case) or all(len(rank.calls) <= 2 * steps(case) for rank in got)),
    demand("right, but what is summed is larger than y and the gradient by x: those are all that need be whole again",
           lambda case, got: not steps(case) or all(sum(sizes) <= sum(wanted(case)) for sizes in reduced(got))),
]


def between(model, row):
    """Hypothesis: model with a row's functions, and numbers: "N" and "1/N" are of the ranks."""
    def outputs(case):
        of_ranks = {"N": len(case), "1/N": 1 / len(case)}
        return model(case, **{name: of_ranks.get(value, value) for name, value in row.items()})
    return outputs


OF_THE_CLASS = ("a layer is changed when a second one is made: what __init__ keeps belongs to the object (self), not "
                "to the class or the module")


def of_another(model, *names):
    """Hypothesis: what has these names is that of the second layer, which drive.py makes."""
    def outputs(case):
        if "xs" not in case[0]:
            return None
        second = {"whole": {name: 1 - x for name, x in case[0]["whole"].items()}, "heads": len(case)}
        return model([rank | {name: second[name] for name in names or ("whole",)} for rank in case])
    return outputs


# ---------------------------------------------------------------- 16.2

def sized(case, got):
    """A rank's parts are whole, or not those of its share."""
    return steps(case) and all(np.shape(rank["params"].get("A")) == case[0]["whole"]["A"].shape for rank in got)


def part_of_b(case, got):
    return steps(case) and not all(same(rank["params"]["b"], case[0]["whole"]["b"], 1e-6) for rank in got)


class Mlp(Check):
    exercise = "16.2"
    signatures = [
        *[gives(sentence, between(worlds.mlp, row)) for sentence, row in BETWEEN],
        gives("f sums in the forward pass too: x is the same on all ranks already, and gets {ranks} times as large",
              between(worlds.mlp, {"f": worlds.total})),
        gives("the sum over the ranks is in g forward, and again for its gradient; f's backward has none: {ranks} "
              "times too large behind g, and the gradient by x partial",
              between(worlds.mlp, {"g_back": worlds.total, "f_back": worlds.same})),
        when("tanh of partial sums: A is cut along the contraction, by rows, so what a rank has before tanh is an "
             "addend, and tanh(u + v) isn't tanh(u) + tanh(v). Cut A by columns", ys_are(worlds.contraction_first)),
        gives("backward goes through what the last forward has kept: two were under way, and each has its own `kept`",
              between(worlds.mlp, {"last": True})),
        gives("backward takes the tanh that the last forward has left on self: several forwards may be under way, and "
              "what each has found belongs into its own `kept`", between(worlds.mlp, {"last": "tanh"})),
        gives(OF_THE_CLASS, of_another(worlds.mlp)),
        last_alone(worlds.mlp_truth),
        gives("the slope of tanh is missing in backward", between(worlds.mlp, {"slope": np.ones_like})),
        gives("the slope of tanh is 1 - tanh², where tanh is what forward has kept; yours takes tanh of it again",
              between(worlds.mlp, {"slope": lambda h: 1 - np.tanh(h) ** 2})),
        gives("the gradients by a and b are means over the rows; they are sums",
              worlds.means_of_rows(worlds.mlp, "a", "b")),
        gives("the gradients of several backwards are added up: each gives those of its own pass", worlds.added_up),
        when("y of one forward is gone after the next: each gives an array of its own", overwritten),
        when("params['b'] isn't all of b on every rank, and each is to add it after g", part_of_b),
        when("y isn't the same on all ranks: what comes after g is to be done on every one", unlike),
        when("y is right, and the gradients by B and b; wrong is what lies behind: dy times Bᵀ, times the slope, which "
             "is 1 - tanh² with the tanh that forward has kept",
             lambda case, got: only_behind(got, worlds.mlp_truth(case), "Aa")),
        when("params are the whole matrices: a rank is to keep its own part, which is why one does all this", sized),
    ]
    demands = [
        demand(lambda case, got: f"right, but {got[0]['changed'][0]} changes the array that it is given: all_reduce "
                                 "works in place, so give it a copy",
               lambda case, got: steps(case) or not any(rank["changed"] for rank in got)),
        *FEW]

    def cases(self, rng, ranks):
        def array(*shape):
            return rng.standard_normal(shape)
        pairs = {"x": array(4, 3, 5), "ct": array(4, 3, 5)}      # of 4 ranks, whatever their number
        found = [[{name: values[rank] for name, values in pairs.items()} for rank in range(ranks)]]
        for inputs, hidden, outputs, rows in ((5, 7, 4, (3, 3, 4)), (4, 3, 6, (4, 4)), (3, 2, 5, (2,)),
                                              (48, 192, 48, (64,))):
            whole = {"A": array(inputs, hidden) / inputs ** 0.5, "a": array(hidden),
                     "B": array(hidden, outputs) / hidden ** 0.5, "b": 1 + array(outputs)}
            case = {"whole": whole, "xs": [array(n, inputs) for n in rows], "dys": [array(n, outputs) for n in rows]}
            found.append([case] * ranks)
        return found

    def truth(self, case):
        return worlds.mlp_truth(case)

    def picture(self, runs, path):
        return drawing.draw(runs[max(runs)][-1], path)


# ---------------------------------------------------------------- 16.3

def forward(**mistake):
    return lambda case: worlds.attention(case, **mistake)[0]["ys"]


def far(case):
    """How large the biases are that make scores large."""
    return np.abs(case[0]["whole"]["qkv_bias"]).max() if steps(case) else 0


def nan(got):
    return any(np.isnan(y).any() for rank in got for y in rank["ys"])


def unnamed(case, got):
    """What the first ValueError says that doesn't name both numbers; None where all do."""
    return next((rank["said"] for rank in got for number in (case[0]["heads"], len(case))
                 if "xs" not in case[0] and str(number) not in rank["said"]), None)


class Attention(Check):
    exercise = "16.3"
    tolerance = 1e-8      # weights of large scores may be a little off, and are multiplied by large keys
    signatures = [
        when("nan where scores are in the thousands: exp overflows, or a whole row vanishes. Subtract the greatest "
             "score of each row first, that row's own, and of those that may be seen",
             lambda case, got: far(case) > 20 and nan(got)),
        when("nan, and not only where scores are large: the softmax goes over numbers that are all -inf. A position "
             "sees itself as well, np.tri(time) without a k, and the softmax goes along the last axis, over what one "
             "position sees", lambda case, got: steps(case) and nan(got)),
        *[gives(text, between(worlds.attention, {"places": places})) for text, places in PLACES],
        *[gives(sentence, between(worlds.attention, row)) for sentence, row in BETWEEN if "f" not in row],
        gives("f_backward doesn't sum, and g's does: the two are exchanged in the backward pass",
              between(worlds.attention, {"f_back": worlds.same, "g_back": worlds.total})),
        gives("backward goes through what the last forward has kept: two were under way, and each has its own `kept`",
              between(worlds.attention, {"last": True})),
        *[gives(OF_THE_CLASS, of_another(worlds.attention, *names))
          for names in (("whole", "heads"), ("whole",), ("heads",))],
        last_alone(worlds.attention_truth),
        when("wrong only where scores are in the tens of thousands, some of them far below 0: what may not be seen "
             "must lie below all of them, -np.inf", lambda case, got: far(case) > 20),
        *[when(text, ys_are(forward(**mistake))) for text, mistake in FORWARD],
        gives("the gradients by the biases are means over the rows; they are sums",
              worlds.means_of_rows(worlds.attention, "qkv_bias", "out_bias")),
        when("y of one forward is gone after the next: each gives an array of its own", overwritten),
        when("y is right, and the gradients by out and out_bias; wrong is what lies behind. dy times outᵀ is [time, "
             "own heads · size], and attend_backward wants the heads first, as attend; what it gives goes the same way "
             "back, to the columns of qkv",
             lambda case, got: only_behind(got, worlds.attention_truth(case), ("qkv", "qkv_bias"))),
        when(lambda case: f"{case[0]['heads']} heads on {len(case)} ranks: no ValueError. Ranks with unequal numbers "
                          "of heads would wait for the slowest, and parts of heads aren't heads",
             lambda case, got: "xs" not in case[0] and not all(rank["refused"] for rank in got)),
    ]
    demands = [
        demand(lambda case, got: f"the ValueError says {unnamed(case, got)!r:.70}: name both numbers, "
                                 f"{case[0]['heads']} and {len(case)}, so that one knows what to change",
               lambda case, got: unnamed(case, got) is None),
        *FEW]

    def cases(self, rng, ranks):
        def array(*shape):
            return rng.standard_normal(shape)
        found = []      # times: None where the layer can't be made; () where only its params are looked at
        for dim, heads, size, times, far, unit in (
                (5, 6, 6, (4, 4, 3), 0, 1), (7, 12, 6, (5,), 1, 1), (7, 6, 4, (5,), 0, 60),
                (3, ranks + 1, 2, None, 0, 1), (4, 6, 5, (), 0, 1)):
            inner = heads * size
            bias = array(3 * inner)
            bias[:inner] -= 40 * far            # of the queries
            bias[inner:2 * inner] += 300 * far  # of the keys: scores are some -29,000, and not far apart
            qkv = 1.5 * array(dim, 3 * inner) / dim ** 0.5
            qkv[:, :2 * inner] *= unit          # of queries and keys: the differences become large as well
            bias[:2 * inner] *= unit
            whole = {"qkv": qkv, "qkv_bias": bias,
                     "out": array(inner, dim) / inner ** 0.5, "out_bias": 1 + array(dim)}
            passes = {} if times is None else {name: [array(n, dim) for n in times] for name in ("xs", "dys")}
            found.append([{"whole": whole, "heads": heads, **passes}] * ranks)
        return found

    def truth(self, case):
        return worlds.attention_truth(case)


# ---------------------------------------------------------------- 16.4

def loss(**how):
    return lambda case: losses.mistaken(case, **how)


def overflowed(case, got):
    return all(not np.isfinite(rank["loss"]) for rank in got) and np.abs(case[0]["logits"]).max() > 700


class CrossEntropy(Check):
    exercise = "16.4"
    signatures = [
        gives("every rank subtracts the maximum of its own columns, and then sums exponentials of different units: all "
              "must subtract the same", loss(maximum=losses.same)),
        gives("every rank's exponentials are those of its own columns' maximum, and the greatest of these is added to "
              "the logarithm of their sum: first the maximum of all ranks, then the exponentials",
              loss(maximum=losses.same, added=losses.greatest)),
        when("the loss isn't a finite number where logits are in the thousands: exp overflows, or all of them vanish. "
             "Subtract the greatest logit of the row, of all ranks' columns", overflowed),
        gives("the sum of the exponentials is that of this rank's columns alone: a softmax of its own on every rank",
              loss(sums=losses.same)),
        gives("the label's logit isn't summed over the ranks: those that don't have the class have 0 in its place",
              loss(picks=losses.same)),
        gives("the label's logit is the greatest of the ranks' numbers, and all but one of these are 0: where it is "
              "below 0, a 0 wins. Sum them", loss(picks=losses.greatest)),
        gives("a label that is another rank's is read at place 0 here: in the loss every rank adds that logit",
              loss(pick=losses.as_zero, one_hot=losses.local)),
        gives("in the gradient every rank subtracts a 1 from each row, at place 0 where the class isn't its own: only "
              "the rank that has the label's class does", loss(one_hot=losses.as_zero)),
        gives("a label that is another rank's is read at place 0 here: its logit is added, and its gradient has a 1 "
              "subtracted, on every rank", loss(pick=losses.as_zero)),
        gives("labels of other ranks are read around the corner: a negative index counts from the end, and isn't an "
              "error", loss(pick=losses.around)),
        gives("labels of the ranks before are read around the corner: label - first is below 0 there, and a negative "
              "index counts from the end. A label is this rank's if first ≤ label < last",
              loss(pick=losses.around_below)),
        gives("labels are taken for numbers of this rank's columns in the gradient: rank r's column 0 is the class "
              "classes·r//N", loss(one_hot=losses.without_first)),
        gives("labels are taken for numbers of this rank's columns: rank r's column 0 is the class classes·r//N",
              loss(pick=losses.without_first)),
        *(gives("labels are looked for at the wrong classes where the ranks' widths differ: rank r's column 0 is the "
                "class classes·r//N, which is neither r times its own width nor r times classes//N",
                lambda case, width=width: loss(pick=losses.by_width(case, width))(case))
          for width in (lambda case, own: own, lambda case, own: case[0]["classes"] // len(case))),
        gives("labels are looked for as if each rank had classes//N columns: where N doesn't divide the classes some "
              "are nobody's, or another rank's", lambda case: loss(pick=losses.by_quotient(case))(case)),
        gives("the loss is the mean over the rows whose label is this rank's: it is over all rows, on every rank",
              loss(mean=losses.own_rows)),
        gives("the gradient is divided by the number of rows whose label is this rank's: the mean is over all rows",
              loss(grad_rows=losses.own_rows)),
        gives("the maximum was subtracted within the logarithm's sum and isn't added again", loss(unshifted=True)),
        gives("the label's logit is shifted by the maximum, and the logarithm isn't: it is too large by the maximum",
              loss(back=True)),
        gives("a label that is the first class of its rank is nobody's: first ≤ label < last", loss(pick=losses.above)),
        gives(lambda case: f"that is the sum of {len(case[0]['labels'])} rows, and so many times too large: the mean "
                           "was asked for", loss(rows=False)),
        gives("the gradient isn't lessened at the label: it is the softmax alone",
              loss(one_hot=lambda labels, first, own: ([], []))),
    ]
    demands = [
        demand(lambda case, got: f"right, but some rank sends {max(map(sum, reduced(got))):,} bytes: three numbers per "
                                 f"row are {24 * len(case[0]['labels']):,}. The logits needn't leave their rank",
               lambda case, got: all(sum(sizes) <= 24 * len(case[0]["labels"]) for sizes in reduced(got))),
    ]

    def cases(self, rng, ranks):
        found = []
        for rows, classes, level, above in ((6, 11, 0.0, 0.0), (9, 8, 2000.0, 0.0), (4, 3, -1500.0, 4000.0)):
            logits = 2 * rng.standard_normal((rows, classes)) + 3 * rng.standard_normal((rows, 1)) + level
            labels = rng.permutation(np.arange(rows) % classes)
            logits[0, (labels[0] + classes // 2) % classes] += 30      # far above what the other ranks have
            logits[1, (labels[1] + classes // 2) % classes] += above   # … and above the other rows
            found.append([{"logits": logits[:, share(classes, rank, ranks)], "labels": labels, "classes": classes}
                          for rank in range(ranks)])
        return found

    def truth(self, case):
        return losses.truth(case)
