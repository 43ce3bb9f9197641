"""How the answers of this chapter are called, where it isn't simply once.

What is to be changed in place is handed over in a list of its own: who replaces an array there changes nothing.
"""

import numpy as np

from minitorch_dist import ledger


def shard(learner, inputs, run):
    """For each number of ranks, epoch and rank; twice, each time with NumPy's global generator somewhere else."""
    parts = []
    for call in inputs["calls"]:
        twice = []
        for again in range(2):
            np.random.seed(1000 * again + call["rank"])
            twice.append(learner(inputs["n"], inputs["batch_size"], **call))
        parts.append(twice)
    return {"parts": parts}


def broadcast_parameters(learner, inputs, run):
    given = list(inputs["parameters"])
    learner(run.comm, given)
    return inputs | {"left": len(given)}


def average_gradients(learner, inputs, run):
    given = list(inputs["grads"])
    learner(run.comm, given, inputs["count"])
    return inputs | {"left": len(given)}


class Reduced:
    """A communicator's hook, and what stands before an answer of 08.3: the ledger hears of parameters in a sum."""

    def __init__(self, parameters, average_gradients):
        self.parameters, self.average_gradients = parameters, average_gradients

    def look(self, arrays):
        if any(np.shares_memory(x, parameter) for x in arrays for parameter in self.parameters):
            ledger.event("parameters", "in a sum over the ranks")

    def before(self, op, x, peer):
        self.look([x] if op == "all_reduce" else [])

    def after(self, op, x, peer):
        pass

    def __call__(self, comm, grads, count):
        self.look(grads)
        return self.average_gradients(comm, grads, count)


def train(learner, inputs, run):
    reduced = Reduced(inputs["parameters"], run.earlier["average_gradients"])
    run.comm.hooks.append(reduced)
    losses = learner(run.comm, **inputs | run.earlier | {"parameters": list(inputs["parameters"]),
                                                         "average_gradients": reduced})
    return inputs | {"result": losses}
