"""How the answers of this chapter are called: steps whose arrays are watched, from being made to being freed."""

import tracemalloc
import weakref
from contextlib import contextmanager

import numpy as np


@contextmanager
def traced():
    """Inside, NumPy's memory is counted by what it was asked for: whoever holds it, and wherever."""
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


def held():
    """Bytes of the arrays that were made inside traced() and are alive. (Of those below 1,024 bytes NumPy keeps some
    for the next ones, and they are counted as well.)"""
    of_numpy = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([of_numpy]).traces)


# ---------------------------------------------------------------- 11.1

def ShardedAdam(learner, inputs, run):
    """Some steps; x after each, and what the optimizer keeps."""
    x = inputs["x"].copy()
    part = run.module.part
    with traced():
        optimizer = learner(run.comm, x, inputs["lr"], tuple(inputs["betas"]), inputs["eps"])
        xs = []
        for grad in inputs["grads"]:
            optimizer.step(grad)
            xs.append(x.copy())
            learner(run.comm, xs[-1].copy(), inputs["lr"], tuple(inputs["betas"]), inputs["eps"])     # beside the other
        kept = held() - sum(copy.nbytes for copy in xs)
    parts = [part(inputs["x"], rank, run.comm.size) for rank in range(run.comm.size)]
    views = any(isinstance(one, np.ndarray) and np.shares_memory(one, inputs["x"]) for one in parts)
    return {"xs": xs, "kept": kept, "grads": inputs["grads"], "parts": parts, "views": views}


# ---------------------------------------------------------------- 11.2

def owner(array):
    """The array that the memory of a view belongs to."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Watched:
    """The communicator, which notes what is gathered, how much of it is alive, and looks at what is held."""

    def __init__(self, comm, look=lambda: None):
        self.comm, self.gathered, self.look = comm, [], look

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def reduce_scatter(self, out, x, *args, **options):
        self.look()
        return self.comm.reduce_scatter(out, x, *args, **options)

    def all_gather(self, out, x, *args, **options):
        whole = owner(out)
        if not any(known is whole for known in self.alive()):
            self.gathered.append(weakref.ref(whole))
        return self.comm.all_gather(out, x, *args, **options)

    def alive(self):
        """The gathered arrays that somebody still holds."""
        return [array for array in (known() for known in self.gathered) if array is not None]

    def names(self, unit):
        """The unit's attributes that lie in one of them: ["self.w, 47 of its 48 elements"]."""
        return [f"self.{name}, {value.size} of its {whole.size} elements" for whole in self.alive()
                for name, value in vars(unit).items() if isinstance(value, np.ndarray) and owner(value) is whole]


class Layer:
    """y = tanh(x W + b), W's rows and b one after the other in a flat array."""

    def __init__(self, inputs, outputs, look):
        self.inputs, self.outputs, self.size, self.look = inputs, outputs, (inputs + 1) * outputs, look

    def cut(self, w, where, **rows):
        for (name, value), width in zip(rows.items(), (self.inputs, self.outputs), strict=False):
            if not isinstance(value, np.ndarray) or value.ndim != 2:
                raise TypeError(f"layer.{where} wants a matrix {name} of this rank's samples, and got {value!r:.60}: "
                                f"what has the {where} of the unit that ran before it returned?")
            if value.shape[1] != width:
                raise ValueError(f"layer.{where} wants a matrix {name} with {width} columns, and got one of shape "
                                 f"{value.shape}: is it another unit's?")
        if not isinstance(w, np.ndarray):
            raise TypeError(f"layer.{where} wants the layer's {self.size} parameters, and got {w!r}: they were freed, "
                            "and must be gathered before they are used")
        if w.shape != (self.size,):
            raise ValueError(f"layer.{where} wants the layer's {self.size} parameters, and got an array of shape "
                             f"{w.shape}: collect all ranks' parts, and leave the padding out")
        return w[:-self.outputs].reshape(self.inputs, self.outputs), w[-self.outputs:]

    def forward(self, w, x):
        matrix, bias = self.cut(w, "forward", x=x)
        self.look()
        return np.tanh(x @ matrix + bias)

    def backward(self, w, x, ct):
        matrix, bias = self.cut(w, "backward", x=x, ct=ct)
        through = ct * (1 - np.tanh(x @ matrix + bias) ** 2)
        grad = np.empty(self.size)
        grad[:-self.outputs] = (x.T @ through).ravel()
        grad[-self.outputs:] = through.sum(0)
        self.look()
        return through @ matrix.T, grad


def Unit(learner, inputs, run):
    """Some steps of gradient descent through several units; or what one step holds in each stage."""
    if "whole" in inputs:
        return {"stages": {str(stage): one_step(stage, learner, inputs, run) for stage in (0, 1, 3)}}
    comm = Watched(run.comm)
    found = {"ys": [], "cts": [], "grads": [], "alive": [], "names": [], "most": 0}

    def look():
        found["most"] = max(found["most"], len(comm.alive()))
    shards = [shard.copy() for shard in inputs["shards"]]
    units = [learner(comm, Layer(*shape, look), shard) for shape, shard in zip(inputs["shapes"], shards, strict=True)]
    between = []        # what one unit has handed to another, step by step
    for x, ct in zip(inputs["xs"], inputs["cts"], strict=True):
        between.append({"x": [], "ct": []})
        for unit in units:
            between[-1]["x"].append(weakref.ref(x))
            x = unit.forward(x)
            found["alive"].append(len(comm.alive()))
            found["names"] += comm.names(unit)
        for unit in reversed(units):
            between[-1]["ct"].append(weakref.ref(ct))
            ct = unit.backward(ct)
            found["alive"].append(len(comm.alive()))
        found["ys"].append(x)
        found["cts"].append(ct)
        found["grads"].append([grad_of(unit, shard).copy() for unit, shard in zip(units, shards, strict=True)])
        for unit, shard in zip(units, shards, strict=True):
            shard -= inputs["lr"] * unit.grad
    found["xs held"] = sum(x() is not None for step in between[:-1] for x in step["x"][1:])
    found["cts held"] = sum(ct() is not None for step in between for ct in step["ct"][1:])
    return found | {"shards": [shards]}


def grad_of(unit, shard):
    """What backward has left."""
    if not isinstance(unit.grad, np.ndarray) or unit.grad.shape != shard.shape:
        what = f"an array of shape {unit.grad.shape}" if isinstance(unit.grad, np.ndarray) else repr(unit.grad)[:60]
        no_part = f"after backward grad is {what}; this rank's part of the gradient has {shard.size} elements, as shard"
        raise TypeError(no_part)
    return unit.grad


class Replica:
    """A unit of the stages 0 and 1: parameters and gradients are whole."""

    def __init__(self, comm, layer, w):
        self.comm, self.layer, self.shard, self.grad = comm, layer, w, None

    def forward(self, x):
        self.x = x
        return self.layer.forward(self.shard, x)

    def backward(self, ct):
        ct, self.grad = self.layer.backward(self.shard, self.x, ct)
        return ct


def one_step(stage, learner, inputs, run):
    """[bytes of parameters, gradients, state, all else] at each moment of a step, with the learner's Adam."""
    from minitorch_dist.comm.communicator import Communicator
    from minitorch_dist.comm.local import LocalEngine
    samples, units, state, adam = [], [], 0, run.earlier["ShardedAdam"]

    def look():
        known = [sum(unit.shard.nbytes for unit in units),
                 sum(unit.grad.nbytes for unit in units if unit.grad is not None), state]
        samples.append([*known, max(held() - sum(known), 0)])
    alone, comm = Communicator(LocalEngine(), "alone"), Watched(run.comm, look)
    with traced():
        for shape, w, shard in zip(inputs["shapes"], inputs["whole"], inputs["shards"], strict=True):
            make, values = (learner, shard) if stage == 3 else (Replica, w)
            units.append(make(comm, Layer(*shape, look), values.copy()))
        optimizers = [adam(comm if stage == 1 else alone, unit.shard) for unit in units]
        state = held() - sum(unit.shard.nbytes for unit in units)
        look()
        x, ct = inputs["xs"][0], inputs["cts"][0]
        for unit in units:
            x = unit.forward(x)
            look()
        for unit in reversed(units):
            ct = unit.backward(ct)
            if stage == 0:
                run.comm.all_reduce(unit.grad)
            look()
        for unit, optimizer in zip(units, optimizers, strict=True):
            optimizer.step(unit.grad)
            look()
    return np.array(samples)


# ---------------------------------------------------------------- 11.3

def clip(learner, inputs, run):
    """The norm, and what is no padding of the parts."""
    parts = [part.copy() for part in inputs["parts"]]
    norm = learner(run.comm, list(parts), inputs["sizes"], inputs["max_norm"])
    return {"norm": norm, "clipped": [part[:n] for part, n in zip(parts, inputs["sizes"], strict=True)]}
