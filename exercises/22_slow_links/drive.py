"""How the answers of this chapter are called."""

import contextlib

import numpy as np


def summed(objects, inputs, run):
    """[what each sum returned, looked at after all]: by turns, object after object, each from one array of its own that
    is filled anew every time, as a training run's is. "changed": calls that have written into it."""
    buffers = [np.empty_like(grads[0]) for grads in inputs["grads"]]
    found, changed = [[] for _ in objects], []
    for step in range(max(map(len, inputs["grads"]))):
        for number, (made, grads, buffer) in enumerate(zip(objects, inputs["grads"], buffers, strict=True)):
            if step < len(grads):
                buffer[...] = grads[step]
                with of_one_object(run, step):
                    found[number].append(made.sum(buffer))
                if not np.array_equal(buffer, grads[step]):
                    changed.append(f"call {step + 1}")
    return {"sums": found, "changed": changed}


@contextlib.contextmanager
def of_one_object(run, step):
    """A first call that meets an array of another shape, after others' calls, says where it may have come from."""
    try:
        yield
    except ValueError as error:
        if step or not getattr(run, "served", False) or "broadcast" not in str(error):
            raise
        raise ValueError(f"{error}: this object has kept nothing yet. Does it see what another one has? Keep it on the "
                         "object, not on the class").with_traceback(error.__traceback__) from None
    run.served = True


# ---------------------------------------------------------------- 22.1

def OneBit(learner, inputs, run):
    """The file's functions, sums over steps, or two ways down a valley."""
    if inputs["what"] == "pack":
        return packed(inputs["v"].copy(), inputs, run)
    if inputs["what"] == "valley":
        return valley(learner, inputs, run) if run.comm.rank == 0 else {}
    found = summed([learner(run.comm) for _ in inputs["grads"]], inputs, run)
    return found | {"changed": found["changed"] + ["v"] * getattr(run, "changes_v", False)}


def packed(v, inputs, run):
    scale, bits = run.module.pack(v)
    unpacked = run.module.unpack(float(scale), np.array(bits), len(v))
    if np.shape(unpacked) != v.shape:
        filled = "; packbits has filled the last byte up" * (np.shape(unpacked) == (8 * len(bits),))
        raise ValueError(f"unpack(scale, bits, {len(v)}) gives an array of shape {list(np.shape(unpacked))}, not "
                         f"[{len(v)}]{filled}")
    changed = not np.array_equal(v, inputs["v"])
    run.changes_v = changed or getattr(run, "changes_v", False)
    return {"scale": float(scale), "bits": np.array(bits), "unpacked": unpacked, "changed": ["v"] * changed}


def valley(learner, inputs, run):
    """{"without", "with"}: [[x, y] after each step] down e·|x + y| + |x - y|, of one rank by itself."""
    from minitorch_dist.comm.communicator import world_of_one
    found = {}
    for name in ("without", "with"):
        made, at = learner(world_of_one()), inputs["start"].copy()
        found[name] = [at.tolist()]
        for _ in range(inputs["steps"]):
            grad = inputs["slope"] * np.sign(at.sum()) * np.ones(2) + np.sign(at[0] - at[1]) * np.array([1.0, -1.0])
            if name == "with":
                at = at - inputs["rate"] * made.sum(grad)
            else:
                at = at - inputs["rate"] * run.module.unpack(*run.module.pack(grad), 2)
            found[name].append(at.tolist())
    return found


# ---------------------------------------------------------------- 22.2

def PowerSGD(learner, inputs, run):
    """How many numbers are sent, sums over steps, or a training run."""
    if inputs["what"] == "numbers":
        return {"numbers": [run.module.numbers(tuple(shape), inputs["rank"]) for shape in inputs["shapes"]]}
    if inputs["what"] == "training":
        return train_compressed(learner, inputs, run)
    before = [q.copy() for q in inputs["q"]]
    found = summed([learner(run.comm, q) for q in before], inputs, run)
    if not all(map(np.array_equal, before, inputs["q"])):
        found["changed"].append("q")
    return found


@contextlib.contextmanager
def unrecorded(comm):
    """The library's own calls are none of the answer's."""
    hooks, comm.hooks[:] = comm.hooks[:], []
    try:
        yield
    finally:
        comm.hooks[:] = hooks


def train_compressed(learner, inputs, run):
    """{"losses": the mean loss of every step, "bytes": sent by this rank per step}, of a GPT in
    DistributedDataParallel whose matrices are summed by the learner's objects."""
    from minitorch_dist import ledger
    try:
        with unrecorded(run.comm), ledger.record() as book:
            found = compressed_losses(learner, inputs, run)
        return {"losses": found, "bytes": book.bytes_sent["world", "all_reduce"] / len(found)}
    except Exception as error:      # whose cause another case shows, and says better
        return {"failed": f"{type(error).__name__}: {error}"}


def compressed_losses(learner, inputs, run):
    from minitorch_dist import nn, optim
    from minitorch_dist.parallel import DistributedDataParallel
    world, model = run.comm, nn.GPT(**inputs["model"], dtype=np.float64)
    for p, array in zip(model.parameters(), inputs["parameters"], strict=True):
        p.data[...] = array
    wrapped = DistributedDataParallel(model, world)
    made = {id(p): learner(world, q) for p, q in zip(model.parameters(), inputs["q"], strict=True) if len(q)}

    def hook(comm, bucket):
        def finish():
            whole = []
            for s in sorted(bucket.segments, key=lambda s: s.start):
                grad = bucket.grads[s.start:s.stop]
                if id(s.tensor) in made:
                    grad[...] = made[id(s.tensor)].sum(grad.reshape(s.tensor.shape)).reshape(-1)
                else:
                    whole.append(grad)
            whole.append(bucket.flat.tail)       # who has used what
            together = np.concatenate(whole)
            comm.all_reduce(together)
            for part, summed in zip(whole, np.split(together, np.cumsum([len(part) for part in whole])), strict=False):
                part[...] = summed
        return finish
    wrapped.register_comm_hook(hook)
    optimizer, found = optim.SGD(model.parameters(), lr=inputs["rate"]), []
    for tokens in inputs["tokens"]:
        here = np.array_split(tokens, world.size)[world.rank]
        optimizer.zero_grad()
        loss = nn.cross_entropy(wrapped(here[:, :-1]), here[:, 1:], reduction="sum") / tokens[:, 1:].size
        loss.backward()
        optimizer.step()
        total = np.array([float(loss.numpy())])
        world.all_reduce(total)
        found.append(float(total[0]))
    return found


# ---------------------------------------------------------------- 22.3

class Inner:
    """A worker's own optimizer: AdamW, or plain SGD."""

    def __init__(self, parameters, kind, lr, decay=0.1):
        self.parameters, self.kind, self.lr, self.decay, self.steps = parameters, kind, lr, decay, 0
        self.state = [np.zeros(p.shape) for p in parameters for _ in range(2)] if kind == "AdamW" else []

    def step(self, grads):
        self.steps += 1
        for i, (p, g) in enumerate(zip(self.parameters, grads, strict=True)):
            if self.kind == "SGD":
                p -= self.lr * g
                continue
            m, v = self.state[2 * i:2 * i + 2]
            m[...], v[...] = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            slope = m / (1 - 0.9 ** self.steps) / (np.sqrt(v / (1 - 0.99 ** self.steps)) + 1e-8)
            p -= self.lr * (slope + self.decay * p)


def DiLoCo(learner, inputs, run):
    """Workers of linear models, whose parameters lie in memory by columns, or a training run of a GPT."""
    if inputs["what"] == "training":
        return train_apart(learner, inputs, run)
    workers = []
    for job in inputs["jobs"]:
        parameters = [p.copy(order="F") for p in job["parameters"]]
        inner = Inner(parameters, job["kind"], job["inner_lr"])
        workers.append((job, parameters, list(parameters), inner, list(inner.state), learner(
            run.comm, parameters, inner, job["every"], lr=job["lr"], momentum=job["momentum"])))
    found = [{"parameters": [], "state": []} for _ in workers]
    wrong = [{"elsewhere": False, "state elsewhere": False, "grads changed": False} for _ in workers]
    for step in range(max(len(job["samples"]) for job in inputs["jobs"])):
        for (job, parameters, places, inner, states, made), out, bad in zip(workers, found, wrong, strict=True):
            if step >= len(job["samples"]):
                continue
            samples, pull = job["samples"][step], job["pull"]
            grads = [np.array(s * (p - t[step])) for p, s, t in zip(places, pull, job["targets"], strict=True)]
            if not samples:
                grads = [np.zeros_like(g) for g in grads]
            before = [g.copy() for g in grads]
            made.step(grads, samples)
            bad["grads changed"] |= not all(np.array_equal(*pair, equal_nan=True) for pair in zip(
                grads, before, strict=True))
            bad["elsewhere"] |= any(a is not b for a, b in zip(parameters, places, strict=True))
            bad["state elsewhere"] |= any(a is not b for a, b in zip(inner.state, states, strict=True))
            out["parameters"].append([p.copy() for p in places])
    for (*_, inner, _, _), out in zip(workers, found, strict=True):
        out["state"] = [s.copy() for s in inner.state]
    return {"jobs": found, "wrong": wrong}


def train_apart(learner, inputs, run):
    """{"losses": {H: the workers' mean loss of every step}, "bytes": {H: sent by this rank per step}}."""
    from minitorch_dist import ledger
    found = {"losses": {}, "bytes": {}}
    try:
        for every in inputs["every"]:
            with unrecorded(run.comm), ledger.record() as book:
                found["losses"][str(every)] = apart_losses(learner, inputs, run, every)
            found["bytes"][str(every)] = book.bytes_sent["world", "all_reduce"] / len(inputs["tokens"])
        for losses in found["losses"].values():
            run.comm.all_reduce(losses)
        return found
    except Exception as error:      # whose cause another case shows, and says better
        return {"failed": f"{type(error).__name__}: {error}"}


def apart_losses(learner, inputs, run, every):
    """This worker's share of the losses."""
    from minitorch_dist import nn
    world, model = run.comm, nn.GPT(**inputs["model"], dtype=np.float64)
    parameters, found = list(model.parameters()), []
    for p, array in zip(parameters, inputs["parameters"], strict=True):
        p.data[...] = array
    arrays = [p.data for p in parameters]
    made = learner(world, arrays, Inner(arrays, "AdamW", inputs["rate"]), every)
    for tokens in inputs["tokens"]:
        here = np.array_split(tokens, world.size)[world.rank]
        for p in parameters:
            p.grad = None
        loss = nn.cross_entropy(model(here[:, :-1]), here[:, 1:])
        loss.backward()
        made.step([p.grad.numpy().copy() for p in parameters], here[:, 1:].size)
        found.append(float(loss.numpy()) * len(here) / len(tokens))
    return np.array(found)


# ---------------------------------------------------------------- 22.4

def smallest_every(learner, inputs, run):
    """Each of the file's functions with its arguments, and the lines of the picture."""
    file = run.module
    job, link = file.Job(**inputs["job"]), file.Link(**inputs["link"])
    if inputs["what"] == "lines":
        return lines(file, inputs, job)
    first = {"all_reduce": (link,), "all_gather": (link,)}.get(inputs["what"], (job, link))
    more = dict(inputs["more"])
    before = (more.pop("nbytes"),) if "nbytes" in more else ()
    return {"result": getattr(file, inputs["what"])(*before, *first, **more)}


def lines(file, inputs, job):
    """{way: seconds per step at each bandwidth}."""
    found = {}
    for bandwidth in inputs["bandwidths"]:
        link = file.Link(inputs["link"]["ranks"], inputs["link"]["latency"], bandwidth)
        for way, seconds in {
                "data parallel": file.data_parallel(job, link, inputs["buckets"]),
                "one bit": file.one_bit(job, link, inputs["encode"]["one bit"]),
                "PowerSGD": file.power_sgd(job, link, *inputs["thin"], inputs["encode"]["PowerSGD"]),
                f"DiLoCo, H={inputs['every']}": file.diloco(job, link, inputs["every"])}.items():
            found.setdefault(way, []).append(float(seconds))
    return {"lines": found}


# ---------------------------------------------------------------- 22.5

def dion_step(learner, inputs, run):
    """Steps of several matrices by turns, or a training run. p: after every step; q: of every step, looked at after
    all; momentum: the sum of the ranks' parts after every step; wrong: what has happened beside it."""
    if inputs["what"] == "training":
        return train_unsummed(learner, inputs, run)
    found = {"p": [[] for _ in inputs["p"]], "q": [[] for _ in inputs["p"]]}
    parts, wrong = [[] for _ in inputs["p"]], []
    now = [{name: inputs[name][k].copy() for name in ("p", "momentum", "q")} for k in range(len(inputs["p"]))]
    for step in range(max(map(len, inputs["grads"]))):
        for k, (mine, grads) in enumerate(zip(now, inputs["grads"], strict=True)):
            if step >= len(grads):
                continue
            grad, before = grads[step].copy(), mine["q"].copy()
            settings = {name: inputs[name][k] for name in ("lr", "mu", "eps")}
            q = learner(run.comm, mine["p"], mine["momentum"], grad, mine["q"], **settings)
            if not isinstance(q, np.ndarray) or q.shape != before.shape:
                given = f"an array of shape {list(q.shape)}" if isinstance(q, np.ndarray) else type(q).__name__
                raise ValueError(f"dion_step gives {given}, not the new Q, of shape {list(before.shape)}")
            wrong += ["grad"] * (not np.array_equal(grad, grads[step]))
            wrong += ["q"] * (not np.array_equal(mine["q"], before, equal_nan=True))
            found["p"][k].append(mine["p"].copy())
            parts[k].append(mine["momentum"].copy())
            found["q"][k].append(q)
            mine["q"] = q.copy()
    with unrecorded(run.comm):
        for part in (part for of in parts for part in of):
            run.comm.all_reduce(part, what="has returned already: momenta are added up, to be compared")
    return found | {"q": [[turned(q) for q in of] for of in found["q"]], "momentum": parts, "wrong": wrong}


def turned(q):
    """With the largest number of each column above 0: a column of P, and with it Q's, may have either sign."""
    largest = np.take_along_axis(q, np.abs(q).argmax(axis=0)[None], axis=0)
    return q * np.where(largest < 0, -1.0, 1.0)


def train_unsummed(learner, inputs, run):
    """{"losses": the mean loss of every step, "bytes": sent by this rank per step for the matrices that the learner
    moves}, of a GPT in DistributedDataParallel that leaves these unsummed."""
    from minitorch_dist import ledger
    try:
        with unrecorded(run.comm), ledger.record() as book:
            losses, others = unsummed_losses(learner, inputs, run, book)
        return {"losses": losses, "bytes": others / len(losses)}
    except Exception as error:      # whose cause another case shows, and says better
        return {"failed": f"{type(error).__name__}: {error}"}


def unsummed_losses(learner, inputs, run, book):
    """The losses, and the bytes that the learner's steps have sent."""
    from minitorch_dist import nn, optim
    from minitorch_dist.parallel import DistributedDataParallel
    world, model = run.comm, nn.GPT(**inputs["model"], dtype=np.float64)
    for p, array in zip(model.parameters(), inputs["parameters"], strict=True):
        p.data[...] = array
    moved = {p.leaf: {"p": p, "momentum": np.zeros(p.shape), "q": q.copy(), "lr": inputs["rate"] * factor}
             for p, q, factor in zip(model.parameters(), inputs["q"], inputs["factors"], strict=True) if len(q)}
    matrices = [state["p"] for state in moved.values()]
    wrapped = DistributedDataParallel(model, world, unsummed=matrices)
    optimizer = optim.AdamW([p for p in model.parameters() if p.leaf not in moved], lr=inputs["plain_rate"])
    losses, sent = [], 0
    for tokens in inputs["tokens"]:
        here = np.array_split(tokens, world.size)[world.rank]
        wrapped.zero_grad()
        loss = nn.cross_entropy(wrapped(here[:, :-1]), here[:, 1:], reduction="sum") / tokens[:, 1:].size
        loss.backward()
        optimizer.step()
        before = book.bytes_sent["world", "all_reduce"]
        for state in moved.values():
            state["q"] = learner(world, state["p"].data, state["momentum"], state["p"].grad.numpy().copy(), state["q"],
                                 state["lr"], inputs["mu"], inputs["eps"])
        sent += book.bytes_sent["world", "all_reduce"] - before
        total = np.array([float(loss.numpy())])
        world.all_reduce(total)
        losses.append(float(total[0]))
    return losses, sent
