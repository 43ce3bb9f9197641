"""What the answers of chapter 13 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.pictures import COLORS, canvas, save

NO_HARM = {"elements read outside of the arrays": 0, "elements written outside of the arrays": 0,
           "elements written by two programs": 0}


def harm(got, word):
    """How many elements were read or written outside of the arrays, or written twice: word is "read", …"""
    return sum(count for name, count in got["memory"].items() if word in name)


def is_out(name, f):
    """A predicate: the output `name` is f(case), element by element, nan where f(case) is nan."""
    def predicate(case, got):
        theirs = f(case)
        return theirs is not None and np.allclose(got[name], theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    return predicate


def both(*predicates):
    return lambda case, got: all(predicate(case, got) for predicate in predicates)


LAUNCHED = demand("right, but no kernel was launched that writes anything: NumPy has done the work",
                  lambda case, got: got["launches"] > 0 and got["bytes_written"] > 0)


# ---------------------------------------------------------------- 13.1

def block_of(case):
    return case["block"].get("block", 1024)


def places(case):
    return np.arange(case["x"].size)


def right_sum(case):
    return case["x"].astype(float) + case["y"].astype(float)


def amid_nans(values, step):
    """What lies in memory, up to as many elements as there are values."""
    memory = np.full(values.size * step, np.nan)
    memory[::step] = values
    return memory[:values.size]


def neighbours(case, blind=(0, 1, 2)):
    """out, if the steps of these arrays (x, y, out) are taken for 1."""
    if all(case["steps"][i] == 1 for i in blind):
        return None
    x, y = (amid_nans(case[name], case["steps"][i]) if i in blind else case[name].astype(float)
            for i, name in ((0, "x"), (1, "y")))
    step = case["steps"][2]
    if 2 not in blind or step == 1:
        return x + y
    memory = np.full(x.size * step, np.nan)
    memory[:x.size] = x + y
    return memory[::step]


def without_last_block(case):
    return np.where(places(case) < case["x"].size // block_of(case) * block_of(case), right_sum(case), np.nan)


def first_block_only(case):
    return np.where(places(case) < block_of(case), right_sum(case), np.nan)


def one_element_each(case):
    """Programs begin one element further than their neighbour, not a block."""
    programs = -(-case["x"].size // block_of(case))
    return np.where(places(case) < programs - 1 + block_of(case), right_sum(case), np.nan)


def every_fourth(case):
    return np.where(places(case) % 4 == 0, right_sum(case), np.nan)


def by_thousands(case):
    """The launcher's grid is for blocks of 1,024, whatever `block` says."""
    programs = -(-case["x"].size // 1024)
    return np.where(places(case) < programs * block_of(case), right_sum(case), np.nan)


class VectorAdd(Check):
    exercise = "13.1"
    tolerance = 1e-6
    signatures = [
        when("all programs work on the same elements, the first block: a program's places begin at tl.program_id(0) * "
             "BLOCK", both(is_out("out", first_block_only), lambda case, got: case["x"].size <= block_of(case)
                           or harm(got, "two programs") > 0)),
        when("a program begins one element behind its neighbour's beginning: program_id counts programs, not "
             "elements, so it must be multiplied by BLOCK",
             both(is_out("out", one_element_each), lambda case, got: harm(got, "two programs") > 0)),
        when("the grid is one program short: size // block leaves out the last block, which is filled in part only. "
             "Round up", is_out("out", without_last_block)),
        when("the grid doesn't follow `block`: it is made for blocks of 1,024", is_out("out", by_thousands)),
        when("the step is in bytes: a.strides is, but pointers in a kernel count elements. Divide by a.itemsize",
             is_out("out", every_fourth)),
        when("the strides of all three arrays are taken for 1: in x[::2] the next element is two further, and between "
             "them lies something else", is_out("out", neighbours)),
        when("x's and y's strides are taken for 1: their elements needn't be neighbours",
             is_out("out", lambda case: neighbours(case, (0, 1)))),
        when("out is written as if its elements were neighbours: out + places * step_out",
             is_out("out", lambda case: neighbours(case, (2,)))),
        when("one step for all: each of the three arrays has strides of its own",
             lambda case, got: len(set(case["steps"])) > 1),
        when("no mask: the last program works on a whole block, and reads and writes behind the end. In a real program "
             "that is somebody else's memory",
             lambda case, got: harm(got, "read outside") > 1 and harm(got, "written outside") > 1),
        when("the mask lets one element too many through: places run from 0 to n - 1",
             lambda case, got: harm(got, "outside") == 3),
        when("the loads have no mask: only the store is kept from the end; what is read behind it may belong to nobody",
             lambda case, got: harm(got, "read outside") > 0 and not harm(got, "written outside")),
        when("the store has no mask: what lies behind the end of out is overwritten",
             lambda case, got: harm(got, "written outside") > 0 and not harm(got, "read outside")),
    ]
    demands = [
        LAUNCHED,
        demand("right, but in more than one launch", lambda case, got: got["launches"] == 1),
        demand("right, but it moves more than 12 bytes per element: read x, read y, write out, each once",
               lambda case, got: got["bytes_read"] + got["bytes_written"] <= 12 * case["x"].size),
    ]

    def cases(self, rng, ranks):
        found = []
        for n, steps, block in ((100, (1, 1, 1), 32), (64, (1, 1, 1), 16), (1500, (1, 1, 1), None),
                                (45, (2, 3, 4), 16), (5, (1, 1, 1), 8)):
            x, y = rng.standard_normal((2, n)).astype(np.float32)
            found.append({"x": x, "y": y, "out": np.full(n, np.nan, np.float32), "steps": steps,
                          "block": {} if block is None else {"block": block}})
        return found

    def truth(self, case):
        return {"out": right_sum(case), "memory": NO_HARM}


# ---------------------------------------------------------------- 13.2

def softmax(z, axis=1):
    with np.errstate(invalid="ignore"):      # of -inf and -inf
        return np.exp(z - np.logaddexp.reduce(z, axis=axis, keepdims=True))


def right_softmax(case):
    return softmax(case["x"].astype(float))


def padding(case):
    columns = case["x"].shape[1]
    return (1 << (columns - 1).bit_length()) - columns


def padded_with(case, value):
    """The softmax of rows that are filled up to a power of 2 with this number (a function of the case)."""
    x = case["x"].astype(float)
    filled = np.concatenate([x, np.broadcast_to(value(x), (x.shape[0], padding(case)))], axis=1)
    return softmax(filled)[:, :x.shape[1]].astype(np.float32)      # what float32 can't hold is 0


def tight_rows(case):
    """The right formula on rows taken to lie right behind each other."""
    (rows, columns), step = case["x"].shape, case["steps"][0]
    if step == columns:
        return None
    memory = np.full((rows, step), np.nan)
    memory[:, :columns] = case["x"]
    return softmax(memory.ravel()[:rows * columns].reshape(rows, columns))


def unshifted(case):
    with np.errstate(all="ignore"):
        e = np.exp(case["x"])      # in float32, as the kernel does
        return (e / e.sum(axis=1, keepdims=True)).astype(float)


def no_sum(case):
    return np.exp(case["x"].astype(float) - case["x"].max(axis=1, keepdims=True))


class Softmax(Check):
    exercise = "13.2"
    tolerance = 2e-6
    signatures = [
        gives("the largest isn't subtracted: exp(89) is more than float32 holds, and inf / inf is nan; far below, "
              "0 / 0 is too", lambda case: {"out": unshifted(case)}),
        gives("the padding holds 0: behind a row of large negative numbers 0 is the largest, and exp(0 - largest) goes "
              "into the sum. exp must make 0 of it: -inf",
              lambda case: {"out": padded_with(case, lambda x: np.zeros(1))}),
        gives("the sum goes over the padding: each lane behind the end adds exp(0) = 1, as if it held the "
              "row's largest",
              lambda case: {"out": padded_with(case, lambda x: x.max(axis=1, keepdims=True))}),
        gives("not divided by the sum: the rows don't add up to 1", lambda case: {"out": no_sum(case)}),
        gives("softmax along the wrong axis: of each column, where rows are asked for",
              lambda case: {"out": softmax(case["x"].astype(float), axis=0)}),
        when("rows are taken to lie right behind each other: they are strides[0] apart, which may be more than columns",
             is_out("out", tight_rows)),
        when("padded lanes are undefined: a masked load without `other` gives anything, and the largest and the sum go "
             "over all lanes", lambda case, got: padding(case) > 0 and np.isnan(got["out"]).all()),
        when("the padding is stored too: it lands behind the row's end, on the next row or somebody else's memory",
             lambda case, got: padding(case) > 0 and harm(got, "written") > 0 and not harm(got, "read outside")),
        when("the load has no mask: what lies behind a row's end is read",
             lambda case, got: padding(case) > 0 and harm(got, "read outside") > 0),
    ]
    demands = [
        LAUNCHED,
        demand("right, but in more than one launch", lambda case, got: got["launches"] == 1),
        demand("right, but it moves more than 8 bytes per element: a row is to be read once, and kept in registers",
               lambda case, got: got["bytes_read"] + got["bytes_written"] <= 8 * case["x"].size),
    ]

    def cases(self, rng, ranks):
        found = []
        for rows, columns, step, shift in ((5, 7, 7, 0), (3, 16, 16, 0), (4, 33, 40, 0), (3, 5, 8, -300),
                                           (3, 6, 6, 300), (2, 1, 1, 3)):
            x = rng.standard_normal((rows, columns)) * 3 + shift + 2 * np.arange(rows)[:, None]
            if columns == 33:
                x[1, 4:9] = -np.inf
            found.append({"x": x.astype(np.float32), "out": np.full((rows, columns), np.nan, np.float32),
                          "steps": (step, columns + 3 * (step > columns))})
        return found

    def truth(self, case):
        return {"out": right_softmax(case), "memory": NO_HARM}

    def picture(self, runs, path):
        case, got = runs[1][2]
        passes = counted(numpy_softmax, case["x"])
        return bars(path, "softmax of rows", passes, got, case["x"].size)


# ---------------------------------------------------------------- 13.3

def owners(case):
    """Which parameter each element belongs to."""
    return np.repeat(np.arange(len(case["ends"])), np.diff([0, *case["ends"]]))


def adamw(case, decay=None, step_of=lambda t: t, corrected=(1, 1), square=lambda g: g * g, l2=False, late=False,
          eps_inside=False, decay_after=False, forgotten=False):
    """p after each step in float64; the keywords are mistakes."""
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8} | case["settings"]
    (beta1, beta2), eps, lr = settings["betas"], settings["eps"], settings["lr"]
    p, found = case["p"].astype(float), []
    m, v = np.zeros(p.size), np.zeros(p.size)
    decay = np.asarray(case["decays"], float)[owners(case)] if decay is None else decay(case)
    for t, g in enumerate(case["grads"].astype(float), 1):
        old = m, v = (0 * m, 0 * v) if forgotten else (m, v)
        if l2:
            g = g + decay * p
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * square(g)
        first, second = old if late else (m, v)
        mean = first / (1 - beta1 ** step_of(t)) if corrected[0] else first
        root = second / (1 - beta2 ** step_of(t)) if corrected[1] else second
        step = lr * mean / (np.sqrt(root + eps) if eps_inside else np.sqrt(root) + eps)
        p = (p - step) * (1 - lr * decay) if decay_after else p * (1 - (0 if l2 else lr) * decay) - step
        found.append(p)
    return np.stack(found)


def mistake(**how):
    return lambda case: {"p": adamw(case, **how)}


def first_decay(case):
    return np.full(case["p"].size, float(case["decays"][0]))


class FusedAdam(Check):
    exercise = "13.3"
    tolerance = 2e-5
    signatures = [
        when("a program reads from behind the tables: its row begins 3 numbers behind its neighbour's, and holds "
             "start, stop and parameter",
             lambda case, got: harm(got, "read outside") > 0 and not harm(got, "written outside")),
        when("the tail isn't masked: the last program of a parameter goes on behind its stop, and so the next "
             "parameter's first elements are updated by two programs at once",
             lambda case, got: harm(got, "written") > 0),
        gives("the step isn't counted on: the corrections are those of step 1 for ever", mistake(step_of=lambda t: 1)),
        gives("the step is counted one too far: the first update is step 1", mistake(step_of=lambda t: t + 1)),
        gives("no bias correction: m and v begin at 0, so in step 1 the mean is (1-β₁) times what it should be, and "
              "the mean of squares (1-β₂) times", mistake(corrected=(0, 0))),
        gives("only the mean of squares is corrected: m / (1-β₁ᵗ) too", mistake(corrected=(0, 1))),
        gives("only the mean is corrected: v / (1-β₂ᵗ) too", mistake(corrected=(1, 0))),
        gives("the step uses the moments as they were before: p moves by what m and v are now, with this gradient in "
              "them", mistake(late=True)),
        gives("eps stands under the root: it is added to √v̂", mistake(eps_inside=True)),
        gives("the decay goes into the gradient (L2), where √v̂ divides it again: AdamW shrinks p itself",
              mistake(l2=True)),
        gives("no weight decay", mistake(decay=lambda case: 0.0)),
        gives("every parameter decays like the first: a program's row of the table says whose elements it has",
              mistake(decay=first_decay)),
        gives("m and v are forgotten from step to step: the kernel must store them", mistake(forgotten=True)),
        gives("v takes the gradient's size, not its square", mistake(square=np.abs)),
        gives("the decay comes after the step: p ← p · (1 - lr · λ) is first", mistake(decay_after=True)),
        when("p stays as it was: the new values must be stored", lambda case, got:
             np.array_equal(got["p"], np.broadcast_to(case["p"], got["p"].shape))),
    ]
    demands = [
        LAUNCHED,
        demand(lambda case: f"right, but with a launch for each of the {len(case['ends'])} parameters. A launch takes "
                            "some 5 µs, longer than the update of a bias: put the programs of all into one grid",
               lambda case, got: got["launches"] != len(case["ends"]) * len(case["grads"]) or len(case["ends"]) < 3),
        demand("right, but in more than one launch per step: m, v and p can be updated while all of them are in "
               "registers", lambda case, got: got["launches"] == len(case["grads"])),
        demand("right, but it moves more than 28 bytes per parameter: p, g, m and v are read once, and p, m and v "
               "written once; what was just stored is still in a register",
               lambda case, got: got["bytes_read"] + got["bytes_written"] <= len(case["grads"]) * (
                   28 * case["p"].size + 16 * (case["p"].size // case["settings"]["block"] + len(case["ends"])))),
    ]

    def cases(self, rng, ranks):
        found = []
        for ends, block, more in (((25, 31, 63), 16, {}), ((32, 37), 8, {"betas": (0.7, 0.9), "eps": 0.1, "lr": 0.05}),
                                  ((70,), 32, {"lr": 0.02}), ((2400, 2410, 3000), 1024, {"lr": 0.01})):
            n = ends[-1]
            p = rng.standard_normal(n) + np.sign(rng.standard_normal(n))
            decays = rng.uniform(0.5, 3, len(ends))
            decays[1:2] = 0
            found.append({"p": p.astype(np.float32), "grads": (rng.standard_normal((3, n)) + 0.5).astype(np.float32),
                          "ends": list(ends), "decays": [float(value) for value in decays],
                          "settings": {"block": block, "lr": 0.03} | more})
        return found

    def truth(self, case):
        return {"p": adamw(case), "grads": case["grads"], "memory": NO_HARM}

    def picture(self, runs, path):
        case, got = runs[1][-1]
        passes = counted(numpy_adam, *np.abs(case["p"][None].repeat(4, axis=0)))
        return bars(path, "Adam", passes, got, len(case["grads"]) * case["p"].size)


# ---------------------------------------------------------------- pictures

class Counting(np.ndarray):
    """An array that notes how many bytes each operation on it reads and writes."""

    noted = []

    def __array_ufunc__(self, ufunc, method, *inputs, **more):
        inputs = [x.view(np.ndarray) if isinstance(x, Counting) else x for x in inputs]
        result = getattr(ufunc, method)(*inputs, **more)
        Counting.noted.append((ufunc.__name__, result.nbytes + sum(x.nbytes for x in inputs if np.ndim(x))))
        return result.view(Counting)


def counted(function, *arrays):
    """[(operation, bytes per element)] of a NumPy function of arrays of one shape."""
    Counting.noted = []
    function(*(a.view(Counting) for a in arrays))
    return [(name, count / arrays[0].size) for name, count in Counting.noted]


def numpy_softmax(x):
    e = np.exp(x - np.maximum.reduce(x, axis=1, keepdims=True))
    return e / np.add.reduce(e, axis=1, keepdims=True)


def numpy_adam(p, g, m, v, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1, t=1):
    p = p * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    return p - (lr / (1 - beta1 ** t)) * m / (np.sqrt(v / (1 - beta2 ** t)) + eps), m, v


def bars(path, title, passes, got, elements):
    """Bytes per element that NumPy moves, operation by operation, and those of the learner's kernel.

    passes: [(operation, bytes per element)]
    """
    figure, axes = canvas(size=(8.6, 2.6))
    at = 0.0
    for i, (name, width) in enumerate(passes):
        axes.barh(0, width, left=at, color=("#bcd4e6", "#9dbfd9")[i % 2])
        axes.text(at + width / 2, 0, name, ha="center", va="center", rotation=90, fontsize=7, color=COLORS[0])
        at += width
    read, written = got["bytes_read"] / elements, got["bytes_written"] / elements
    axes.barh(1, read, color=COLORS[2], label="read")
    axes.barh(1, written, left=read, color=COLORS[1], label="written")
    for place, total in ((0, at), (1, read + written)):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize=11)
    axes.set(yticks=(0, 1), yticklabels=("NumPy", "your kernel"), xlabel=f"{title}: bytes moved per element",
             xlim=(0, 1.08 * at))
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)
    return (f"your kernel moves {read + written:.3g} bytes per element, NumPy's {len(passes)} operations {at:.3g}: "
            f"where memory is what one waits for, that is {at / (read + written):.1f} times as fast")
