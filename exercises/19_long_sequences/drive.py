"""How the answers of this chapter are called."""

import time
import traceback
import tracemalloc

import numpy as np

# ---------------------------------------------------------------- 19.1 and 19.2


def peak(call):
    """The most bytes that lived at a time of what was made during the call."""
    tracemalloc.start(1)
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def long(inputs, blocks):
    """(q, k, v, q_at, k_at) with so many blocks of keys."""
    keys = blocks * inputs["block"]
    q = np.full((1, inputs["queries"], inputs["size"]), 0.1)
    k, v = np.full((2, 1, keys, inputs["size"]), 0.2)
    return q, k, v, np.arange(inputs["queries"]) + keys, np.arange(keys)


def attention(learner, inputs, run):
    """One of the three functions of the file, or the memory that the last one takes."""
    if inputs["what"] == "memory":
        found = {"pieces": [], "at_once": []}
        for blocks in inputs["blocks"]:
            given = long(inputs, blocks)
            found["pieces"].append(peak(lambda given=given: learner(*given, block=inputs["block"])))
            found["at_once"].append(peak(lambda given=given: run.module.attend(*given)))
        return found
    given = {name: value for name, value in inputs.items() if name != "what"}
    function = {"attend": run.module.attend, "merge": run.module.merge, "attention": learner}[inputs["what"]]
    pairs = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    with np.errstate(all="ignore"):
        out, lse = function(**given | pairs)
    return {"out": out, "lse": lse} | given


def attention_backward(learner, inputs, run):
    """The gradient by some of the keys; or the weights; or the memory that it takes."""
    if inputs["what"] == "memory":
        found = {"pieces": []}
        for blocks in inputs["blocks"]:
            given = long(inputs, blocks)
            out, lse = np.full_like(given[0], 0.2), np.full(given[0].shape[:2], np.log(len(given[4])))
            given = *given, out, lse, out
            found["pieces"].append(peak(lambda given=given: learner(*given, block=inputs["block"])))
        return found
    mine = slice(*inputs["mine"])
    given = {"q": inputs["q"], "k": inputs["k"][:, mine].copy(), "v": inputs["v"][:, mine].copy(),
             "q_at": inputs["q_at"], "k_at": inputs["k_at"][mine].copy(), "lse": inputs["lse"]}
    with np.errstate(all="ignore"):
        if inputs["what"] == "weights":
            del given["v"]
            return {"weights": run.module.weights(**given), "q": inputs["q"], "lse": inputs["lse"]}
        given |= {name: inputs[name] for name in ("out", "dout", "block")}
        before = {name: np.copy(value) for name, value in given.items()}
        found = dict(zip(("dq", "dk", "dv"), learner(**given), strict=True))
    return found | {"changed": [name for name in before if not np.array_equal(given[name], before[name])]}


# ---------------------------------------------------------------- 19.3

class Watch:
    """A communicator's hook: notes what is done to an array that is being sent."""

    def __init__(self):
        self.leaving, self.arriving, self.notes = {}, {}, []

    def before(self, op, x, peer):
        if op in ("recv", "irecv"):
            if any(np.shares_memory(x, other) for other, _ in self.leaving.values()):
                self.notes.append("a message is received into the array that is still being sent. What arrives needs "
                                  "an array of its own")
        elif any(np.shares_memory(x, other) for other in self.arriving.values()):
            self.notes.append("a message is received into the array that is still being sent, or what is sent on "
                              "hasn't arrived yet. What arrives needs an array of its own, and a wait before use")
        if op == "isend":
            self.leaving[id(x)] = x, x.copy()
        elif op == "irecv":
            self.arriving[id(x)] = x

    def after(self, op, x, peer):
        if op == "irecv":
            self.arriving.pop(id(x), None)
        elif op == "isend" and id(x) in self.leaving:
            x, was = self.leaving.pop(id(x))
            if not np.array_equal(x, was, equal_nan=True):
                self.notes.append("an array is changed while it is being sent, before its work.wait()")


def timed(function, spans, at):
    """The function; every call is noted: when it began and ended, and whose keys it was given (-1: nobody's)."""
    def call(q, k, v, q_at, k_at, *args, **kwargs):
        begin = time.perf_counter()
        found = function(q, k, v, q_at, k_at, *args, **kwargs)
        whose = [rank for rank, places in enumerate(at) if np.array_equal(places, k_at)]
        spans.append([begin, time.perf_counter(), whose[0] if whose else -1])
        return found
    return call


def RingAttention(learner, inputs, run):
    """All forwards, then all backwards, in the order that the inputs say."""
    spans, at, watch = [], inputs["at"], Watch()
    run.comm.hooks.append(watch)
    functions = timed(run.earlier["attention"], spans, at), run.earlier["attention_backward"]
    # A second one is made, of the reversed sequence, and not used.
    ring, _ = (learner(run.comm, places, *functions) for places in (at, [of[::-1].copy() for of in at[::-1]]))
    before = [{name: x.copy() for name, x in one.items()} for one in inputs["passes"]]
    made = [ring.forward(*(one[name] for name in "qkv")) for one in inputs["passes"]]
    outs, turn = [np.array(out) for out, _ in made], time.perf_counter()
    found = {number: ring.backward(made[number][1], inputs["passes"][number]["dout"])
             for number in inputs["backwards"]}
    grads = [found[number] for number in range(len(made))]
    changed = [name for one, was in zip(inputs["passes"], before, strict=True) for name in one
               if not np.array_equal(one[name], was[name])]
    return {"outs": outs, **{name: [np.array(of[i]) for of in grads] for i, name in enumerate(("dqs", "dks", "dvs"))},
            "work": spans, "turn": turn, "touched": watch.notes, "changed": changed}


# ---------------------------------------------------------------- 19.4

class Counted:
    """An attention, or its backward, that counts the pairs of a query and a key which it is given."""

    def __init__(self, function):
        self.function, self.pairs = function, 0

    def __call__(self, q, k, *args, **kwargs):
        self.pairs += q.shape[1] * k.shape[1]
        return self.function(q, k, *args, **kwargs)


def positions(learner, inputs, run):
    """One of the file's functions, or a training run with all of them."""
    if inputs["what"] == "layout":
        return {"positions": [learner(time, inputs["rank"], inputs["size"]) for time in inputs["times"]]}
    if inputs["what"] == "refused":
        try:
            learner(inputs["time"], run.comm.rank, inputs["size"])
        except ValueError as error:
            return {"refused": True, "said": str(error)}
        return {"refused": False, "said": ""}
    if inputs["what"] == "products":
        return {"products": [sorted([int(i), int(j)] for i, j in run.module.products(*pair))
                             for pair in inputs["pairs"]]}
    if inputs["what"] == "unequal":
        return {"found": tried(halves, inputs, run)}
    return halves(inputs, run) if inputs["what"] == "halves" else train(learner, inputs, run)


def tried(function, *args):
    """What it gives, or how it fails, where another case shows the commoner causes, and says better."""
    try:
        return function(*args)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def halves(inputs, run):
    """Forward and backward of the keys at hand."""
    mine = slice(*inputs["mine"])
    given = {"q": inputs["q"], "k": inputs["k"][:, mine].copy(), "v": inputs["v"][:, mine].copy(),
             "q_at": inputs["q_at"], "k_at": inputs["k_at"][mine].copy()}
    handed = {name: x.copy() for name, x in given.items()}
    before = inputs["before"] and tuple(x.copy() for x in inputs["before"])
    counted = [Counted(run.earlier[name]) for name in ("attention", "attention_backward")]
    kept = {name: inputs[name].copy() for name in ("out", "lse", "dout")}
    out, lse = run.module.by_halves(*given.values(), before, counted[0])
    grads = run.module.backward_by_halves(*given.values(), *kept.values(), counted[1])
    changed = [name for name, value in kept.items() if not np.array_equal(value, inputs[name])]
    changed += [name for name, was in handed.items() if not np.array_equal(given[name], was)]
    if before and not all(map(np.array_equal, before, inputs["before"])):
        changed.append("before")
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True)), "changed": changed,
            "pairs": [each.pairs for each in counted]}


class Context:
    """What the library's GPT asks where it has a part of each sequence: which positions, and attention to all."""

    def __init__(self, comm, at, ring):
        self.comm, self.at, self.ring = comm, at, ring

    def length(self, time):
        return self.comm.size * time

    def positions(self, time):
        return self.at[self.comm.rank]

    def __call__(self, q, k, v, causal, scale=None, documents=None, window=None):
        from minitorch_dist.autodiff import custom_vjp

        @custom_vjp
        def attend(q, k, v):
            return forward(q, k, v)[0]

        def forward(*qkv):
            flat = [np.ascontiguousarray(x.reshape(-1, *x.shape[2:])) for x in qkv]
            out, kept = self.ring.forward(*flat)
            made.append(kept)
            return np.asarray(out).reshape(*qkv[0].shape[:3], -1), ()

        def backward(residuals, dout):
            grads = self.ring.backward(made[0], np.ascontiguousarray(dout.reshape(-1, *dout.shape[2:])))
            return tuple(np.asarray(grad).reshape(q.shape) for grad in grads)
        made = []
        return attend.defvjp(forward, backward)(q, k, v)


def train(learner, inputs, run):
    """{"losses", "work": pairs per ring step of the first attention}, of a GPT whose attention is the learner's."""
    comm, length = run.comm, inputs["model"]["length"]
    at = [np.asarray(learner(length, rank, comm.size)) for rank in range(comm.size)]
    if sorted(np.concatenate(at).tolist()) != list(range(length)) or len({len(of) for of in at}) > 1:
        return {"failed": "the positions of all ranks aren't 0, 1, 2 …, each once and as many on each rank"}
    work = {"forward": [], "backward": []}
    return tried(lambda: {"losses": losses(comm, at, inputs, counting_ring(comm, at, run, work)), "work": work})


def counting_ring(comm, at, run, work):
    """The learner's ring with the learner's halves; work: pairs in each of its steps, forward and backward."""
    earlier = run.earlier

    def noted(name, call, function):
        counted = Counted(function)
        found = call(counted)
        work[name].append(counted.pairs)
        return found

    def attention(q, k, v, q_at, k_at, before=None, block=64):
        return noted("forward", lambda inner: run.module.by_halves(q, k, v, q_at, k_at, before, inner),
                     earlier["attention"])

    def attention_backward(q, k, v, q_at, k_at, out, lse, dout, block=64):
        given = q, k, v, q_at, k_at, out, lse, dout
        return noted("backward", lambda inner: run.module.backward_by_halves(*given, inner),
                     earlier["attention_backward"])
    return earlier["RingAttention"](comm, at, attention, attention_backward)


def losses(comm, at, inputs, ring):
    """The mean loss of every step, of all ranks' positions."""
    from minitorch_dist import nn, optim
    model = nn.GPT(**inputs["model"], dtype=np.float64)
    for p, array in zip(model.parameters(), inputs["parameters"], strict=True):
        p.data[...] = array
    context = Context(comm, at, ring)
    for module in model.modules():
        if hasattr(type(module), "context"):
            module.context = context
    optimizer, found = optim.SGD(model.parameters(), lr=inputs["rate"]), []
    for tokens in inputs["tokens"]:
        here, targets = tokens[:, :-1][:, at[comm.rank]], tokens[:, 1:][:, at[comm.rank]]
        optimizer.zero_grad()
        loss = nn.cross_entropy(model(here), targets, reduction="sum") / (tokens.size - len(tokens))
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        flat = np.concatenate([[float(loss.numpy())], *(grad.numpy().ravel() for grad in grads)])
        comm.all_reduce(flat)
        for grad, total in zip(grads, np.split(flat[1:], np.cumsum([grad.size for grad in grads])), strict=False):
            grad[...] = total.reshape(grad.shape)
        optimizer.step()
        found.append(float(flat[0]))
    return found


# ---------------------------------------------------------------- 19.5

class Metered:
    """19.1's attention, and what it was given: calls, and pairs of a query and a key, all heads'."""

    def __init__(self, function):
        self.function, self.calls, self.pairs = function, 0, 0

    def __call__(self, q, k, *args, **kwargs):
        self.calls += 1
        self.pairs += q.shape[0] * q.shape[1] * k.shape[1]
        return self.function(q, k, *args, **kwargs)


def block_attention(learner, inputs, run):
    """One of the file's functions, or a training run with all of them."""
    if inputs["what"] == "training":
        return tried(recall_of, learner, inputs, run)
    if inputs["what"] == "memory":
        q = np.cos(np.arange(4 * inputs["time"]) ** 2.0).reshape(1, inputs["time"], 4)
        return {"bytes": peak(lambda: learner(q, q, q, inputs["size"], inputs["count"], run.earlier["attention"]))}
    given = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in inputs.items()
             if name not in ("what", "first")}
    with np.errstate(all="ignore"):
        if inputs["what"] == "means":
            found = {"means": run.module.mean_keys(**given)}
        elif inputs["what"] == "choose":
            found = {"chosen": run.module.choose(**given)}
        else:
            metered = Metered(run.earlier["attention"])
            found = {"out": learner(**given, attention=metered), "pairs": metered.pairs, "calls": metered.calls}
    return found | {"changed": [name for name, value in given.items() if not np.array_equal(value, inputs[name])]}


def recall_of(learner, inputs, run):
    """{"losses", "chosen": of the last step's first sequence}, of a model that attends by the learner's blocks."""
    size, count, last = inputs["size"], inputs["count"], []

    def attend(q, k, v):
        return learner(q, k, v, size, count, run.earlier["attention"])

    def seen(q, k):
        chosen = np.asarray(run.module.choose(q, run.module.mean_keys(k, size), size, count), bool)
        last[:] = [chosen[0]]
        at = np.arange(q.shape[1])
        return chosen[:, :, at // size] & (at <= at[:, None])
    return {"losses": recall(inputs, attend, seen), "chosen": last[0]}


def recall(inputs, attend, seen):
    """The loss of every step, of a model that has attention and nothing else: a position's query is made of its symbol,
    its key of the symbol before it, its value is its symbol; what it reads, times `gain`, are the next one's logits.
    Only queries and keys are learned, by Adam.

    inputs  symbols [steps, batch, time + 1]: each once, and then once more, which is counted but for the first of them,
            that nothing tells; table [2, symbols + 1, features]
    attend  (q, k, v) -> out; seen: (q, k) -> bool [batch, queries, keys], through which the gradient goes
    """
    table, symbols = inputs["table"].copy(), inputs["table"].shape[1] - 1
    first, second, losses = np.zeros(table.shape), np.zeros(table.shape), []
    for step, drawn in enumerate(inputs["symbols"], 1):
        here, following = drawn[:, :-1], drawn[:, 1:]
        before = np.concatenate([np.full((len(here), 1), symbols), here[:, :-1]], 1)
        q, k, v = table[0][here], table[1][before], np.eye(symbols)[here]
        logits = inputs["gain"] * np.asarray(attend(q, k, v))[:, symbols:]
        p = np.exp(logits - logits.max(2, keepdims=True))
        p /= p.sum(2, keepdims=True)
        right = np.eye(symbols)[following[:, symbols:]]
        losses.append(float(-np.log((p * right).sum(2)).mean()))
        grad = np.zeros(v.shape)
        grad[:, symbols:] = inputs["gain"] * (p - right) / right[..., 0].size
        grads = np.zeros(table.shape)
        by_q, by_k = through_softmax(q, k, v, seen(q, k), grad)
        np.add.at(grads[0], here, by_q)
        np.add.at(grads[1], before, by_k)
        first, second = 0.9 * first + 0.1 * grads, 0.99 * second + 0.01 * grads ** 2
        table -= inputs["rate"] * first / (1 - 0.9 ** step) / (np.sqrt(second / (1 - 0.99 ** step)) + 1e-8)
    return losses


def through_softmax(q, k, v, seen, dout):
    """(dq, dk) of attention to what is seen."""
    root = q.shape[2] ** 0.5
    scores = np.where(seen, q @ k.transpose(0, 2, 1) / root, -np.inf)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    by_p = dout @ v.transpose(0, 2, 1)
    by_score = weights * (by_p - (weights * by_p).sum(2, keepdims=True)) / root
    return by_score @ k, by_score.transpose(0, 2, 1) @ q


# ---------------------------------------------------------------- 19.6

def SlicedAttention(learner, inputs, run):
    """Two layers' outputs, slice by slice; or the memory that slices take."""
    if inputs["what"] == "memory":
        tracemalloc.start(1)
        try:        # the first row twice: what an answer's first calls leave behind isn't counted
            return tried(lambda: {"metered": [metered(learner, inputs, steps)
                                              for steps in [inputs["rows"][0], *inputs["rows"]]][1:]})
        finally:
            tracemalloc.stop()
    layers, changed = [learner(), learner()], set()
    found = {name: [[None] * len(batch["slices"]) for batch in inputs["batches"]] for name in ("out", "dq", "dk", "dv")}
    given = [[{name: x.copy() for name, x in one.items()} for one in batch["slices"]] for batch in inputs["batches"]]

    def walk():
        for kind, which, j in inputs["steps"]:
            batch, mine = inputs["batches"][which], given[which][j]
            layer, number, was = layers[batch["layer"]], batch["number"], batch["slices"][j]
            if kind == "F":
                got = {"out": layer.forward(number, mine["q"], mine["k"], mine["v"])}
            else:
                got = dict(zip(("dq", "dk", "dv"), layer.backward(number, mine["dout"]), strict=True))
            changed.update(name for name, x in mine.items() if not np.array_equal(x, was[name]))
            for name, x in got.items():
                found[name][which][j] = x.copy() if isinstance(x, np.ndarray) else x
            # What is the caller's by now, the caller writes into.
            for x in (*got.values(), *([mine["dout"]] if kind == "B" else [])):
                if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.flags.writeable:
                    x.fill(np.nan)
    said = ""
    try:
        with np.errstate(all="ignore"):
            walk()
    except Exception as error:
        if inputs["what"] == "equal slices":        # with which everybody begins; what others show is judged
            raise
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_globals is vars(run.module)]
        said = f"{type(error).__name__}: {error}" + "".join(f", at your line {line}" for line in lines[-1:])
    return found | {"failed": bool(said), "said": said, "changed": sorted(changed)}


def metered(learner, inputs, steps):
    """{"peaks": the bytes that each call takes at a time, "held": those that are held after it, "left": those in large
    arrays after the last one; "views": {name: how many times as large what it is a view of}}."""
    heads, size, length = inputs["heads"], inputs["size"], inputs["length"]
    whole = np.cos(np.arange(heads * inputs["slices"] * length * size) ** 2.0).reshape(heads, -1, size)
    taken, views = np.zeros((2, len(steps))), {}
    before, large_before = tracemalloc.get_traced_memory()[0], large()
    layer = learner()
    for number, (kind, batch, j) in enumerate(steps):
        own = [whole[:, j * length:(j + 1) * length].copy() for _ in range(3 if kind == "F" else 1)]
        at_first = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        got = layer.forward(batch, *own) if kind == "F" else layer.backward(batch, *own)
        taken[0, number] = tracemalloc.get_traced_memory()[1] - at_first
        got = (got,) if kind == "F" else got
        for name, x in zip(("out",) if kind == "F" else ("dq", "dk", "dv"), got, strict=True):
            if isinstance(getattr(x, "base", None), np.ndarray) and x.base.nbytes > x.nbytes:
                views[name] = x.base.nbytes / x.nbytes
        del got, own, x
        taken[1, number] = tracemalloc.get_traced_memory()[0] - before
    return {"peaks": taken[0], "held": taken[1], "left": large() - large_before, "views": views}


def large():
    """Bytes that live, in pieces of 1,024 or more: of smaller ones NumPy keeps some for the next arrays."""
    return sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.size >= 1024)
