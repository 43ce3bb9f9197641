"""How the answers of this chapter are called: layers that count, on arrays whose lives are watched."""

import tracemalloc
import weakref

import numpy as np


class Watched:
    """Counts the arrays made here that are alive, and notes the number at each change; and how many bytes NumPy holds
    at the most, copies among them, of what was made since tracemalloc has begun."""

    def __init__(self):
        self.live, self.course, self.most = 0, [], 0

    def look(self):
        of_numpy = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        held = tracemalloc.take_snapshot().filter_traces([of_numpy]).traces
        self.most = max(self.most, sum(trace.size for trace in held))

    def array(self, values):
        made = np.array(values)
        self.change(1)
        weakref.finalize(made, self.change, -1).atexit = False
        return made

    def change(self, by):
        self.live += by
        self.course.append(self.live)


class Layer:
    """y = tanh(W x), a vector. Counts its calls, adds up its gradient."""

    def __init__(self, weight, watched):
        self.weight, self.watched, self.forwards, self.backwards = weight, watched, 0, 0
        self.grad = np.zeros_like(weight)

    def forward(self, x):
        self.forwards += 1
        return self.watched.array(np.tanh(self.weight @ x))

    def backward(self, x, ct):
        self.watched.look()
        self.backwards += 1
        through = ct * (1 - np.tanh(self.weight @ x) ** 2)
        self.grad += np.outer(through, x)
        return through @ self.weight


def checkpointed(learner, inputs, run):
    watched = Watched()
    layers = [Layer(w, watched) for w in inputs["weights"]]
    x = watched.array(inputs["x"])
    tracemalloc.start(1)
    y, ct = learner(layers, x, inputs["ct"], inputs["every"])
    tracemalloc.stop()
    return {"y": np.array(y), "x": x, "ct_x": ct, "grads": [layer.grad for layer in layers],
            "forwards": [layer.forwards for layer in layers], "backwards": [layer.backwards for layer in layers],
            "course": watched.course, "peak": max(watched.course), "held": watched.most / x.nbytes,
            "ct": inputs["ct"]}


class DropoutLayer:
    """y = mask · tanh(W x), each unit kept with probability ¾ and divided by it."""

    def __init__(self, weight, watched):
        self.weight, self.watched, self.forwards, self.drawn = weight, watched, 0, []
        self.grad = np.zeros_like(weight)

    def forward(self, x, rng):
        self.forwards += 1
        mask = self.watched.array((rng.random(len(self.weight)) < 0.75) / 0.75)
        self.drawn.append(mask.copy())
        return self.watched.array(mask * np.tanh(self.weight @ x)), mask

    def backward(self, x, mask, ct):
        through = ct * mask * (1 - np.tanh(self.weight @ x) ** 2)
        self.grad += np.outer(through, x)
        return through @ self.weight


def Segment(learner, inputs, run):
    """Two training steps through segments that share a generator, then one more number from it."""
    watched, rng = Watched(), np.random.Generator(np.random.MT19937(inputs["seed"]))
    np.random.seed(inputs["seed"] + 1)
    layers = [DropoutLayer(w, watched) for w in inputs["weights"]]
    size = inputs["size"]
    segments = [learner(layers[i:i + size], rng) for i in range(0, len(layers), size)]
    found = {"y": [], "ct_x": [], "kept": [], "same masks": []}
    for x, ct in zip(inputs["xs"], inputs["cts"], strict=True):
        for segment in segments:
            x = segment.forward(x)
        found["y"].append(np.array(x))
        found["kept"].append(watched.live)
        for segment in reversed(segments):
            ct = segment.backward(ct)
        found["ct_x"].append(ct)
        found["same masks"].append(all((mask == layer.drawn[0]).all() for layer in layers for mask in layer.drawn))
        for layer in layers:
            layer.drawn.clear()
    return found | {"grads": [layer.grad for layer in layers], "next": float(rng.random()), "xs": inputs["xs"],
                    "cts": inputs["cts"], "forwards": [layer.forwards for layer in layers]}


def best_every(learner, inputs, run):
    return {"result": learner(inputs["n"]),
            "peaks": [run.module.peak(inputs["n"], every) for every in range(1, inputs["lengths"] + 1)]}
