"""How the answers of this chapter are called, where it isn't simply once."""

import numpy as np

from minitorch_dist import ledger


class Overlaps:
    """A communicator's hook: notes in the ledger when an array is received into while it may still be read for sending.

    What then arrives depends on who is faster; the hook makes it a fact that doesn't.
    """

    def __init__(self):
        self.posted = {}

    def before(self, op, x, peer):
        kind = {"isend": "send", "irecv": "recv", "send": "send", "recv": "recv"}.get(op)
        for other_kind, other in self.posted.values():
            if kind != other_kind and np.shares_memory(x, other):
                ledger.event("overlap", f"{op} while the {'i' + other_kind} of the same array isn't waited for")
        if op in ("isend", "irecv"):
            self.posted[op, id(x), peer] = kind, x

    def after(self, op, x, peer):
        self.posted.pop((op, id(x), peer), None)


def exchange(learner, inputs, run):
    """outgoing and incoming may be one array; the result is what stands in incoming."""
    run.comm.hooks.append(Overlaps())
    outgoing = inputs["outgoing"]
    incoming = outgoing if inputs["one_array"] else np.full(inputs["shape"], np.nan, outgoing.dtype)
    learner(run.comm, outgoing, inputs["dst"], incoming, inputs["src"])
    return {"incoming": incoming} | ({} if inputs["one_array"] else {"outgoing": outgoing})


def all_gather(learner, inputs, run):
    """The list of one call, after another one of other numbers, which nobody watches."""
    result = learner(run.comm, **inputs | run.earlier)
    hooks, run.comm.hooks[:] = run.comm.hooks[:], []
    learner(run.comm, inputs["x"] + 1, **run.earlier)
    run.comm.hooks[:] = hooks
    return inputs | {"result": result}
