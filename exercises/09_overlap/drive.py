"""How the answers of this chapter are called: backward passes in simulated seconds, over a simulated link."""

import operator
import weakref
from contextlib import suppress

import numpy as np

from minitorch_dist.comm.link import SimulatedLink, VirtualClock


class Watch:
    """A hook: how many gradients were ready when something was posted, and when."""

    def __init__(self, clock, link):
        self.clock, self.link, self.ready, self.posts = clock, link, 0, []

    def before(self, op, x, peer):
        begin = max(self.clock(), self.link.free)
        self.link.before(op, x, peer)
        self.posts.append([self.ready, int(x.nbytes), self.clock(), begin, begin])

    def sent(self, op, nbytes):
        self.link.sent(op, nbytes)
        self.posts[-1][-1] = self.link.free

    def after(self, op, x, peer):
        self.link.after(op, x, peer)


class Beside:
    """Another Reducer, whose passes lie around those of the first: in each the first bucket is posted before, and
    parts of those behind it are complete. Its gradients are the first one's, with the opposite sign.

    sums  of each pass
    """

    def __init__(self, learner, inputs, run):
        self.grads, self.sums = [np.full(s, np.nan, inputs["dtype"]) for s in inputs["shapes"]], []
        self.buckets = inputs["buckets"]
        self.reducer = learner(run.comm, self.buckets, list(self.grads))

    def begin(self, own):
        for grad, one in zip(self.grads, own, strict=True):
            grad[...] = -one
        for bucket in self.buckets:
            self.reducer.ready(bucket[0])

    def finish(self):
        for i in [i for bucket in self.buckets for i in bucket[1:]]:
            self.reducer.ready(i)
        self.reducer.finish()
        self.sums.append([grad.copy() for grad in self.grads])


def Reducer(learner, inputs, run):
    """Some backward passes: each gradient costs its seconds, is written down, and is reported."""
    clock = VirtualClock()
    grads = [np.full(shape, np.nan, inputs["dtype"]) for shape in inputs["shapes"]]
    reducer = learner(run.comm, inputs["buckets"], list(grads))     # of the arrays themselves a new list: in place
    other = Beside(learner, inputs, run) if inputs["beside"] else None
    found = {"grads": [], "posts": [], "seconds": [], "buckets": inputs["buckets"]}
    for order, own in zip(inputs["orders"], inputs["own"], strict=True):
        if other:
            other.begin(own)
        begin = clock()
        watch = Watch(clock, SimulatedLink(inputs["latency"], inputs["bandwidth"], clock))
        run.comm.hooks.append(watch)
        for i, grad in enumerate(grads):
            grad[...] = np.nan if i in order else 0.0
        for i in order:
            clock.sleep(inputs["costs"][i])
            grads[i][...] = own[i]
            watch.ready += 1
            reducer.ready(i)
        watch.ready += 1
        reducer.finish()
        run.comm.hooks.remove(watch)
        found["grads"].append([grad.copy() for grad in grads])
        found["posts"].append([[ready, nbytes, *(t - begin for t in times)] for ready, nbytes, *times in watch.posts])
        found["seconds"].append(clock() - begin)
        if other:
            other.finish()
    return found | ({"beside": other.sums} if other else {})


def moments(piece):
    """The gradients of the sum of a piece's losses, of a loss whose gradients are easily written down."""
    return [piece.sum(0), piece.T @ piece]


def accumulate(learner, inputs, run):
    """Twice with the same arrays; then no_sync() with an exception inside, and one in another."""
    grads = [np.zeros(inputs["width"]), np.zeros((inputs["width"],) * 2)]
    sync = run.module.GradientSync(run.comm, list(grads))
    totals, rows, kept, made, alive = [], [], [], [], []

    def counted(piece):
        rows[-1].append(len(piece))
        alive.append(sum(last() is not None for last in made))
        new = moments(piece)
        made.append(weakref.ref(new[-1]))
        return new

    for pieces in inputs["batches"]:
        for grad in grads:
            grad[...] = 0
        rows.append([])
        given = list(pieces)
        learner(sync, given, counted, inputs["count"])
        kept.append(len(given) == len(pieces) and all(map(operator.is_, given, pieces)))
        totals.append([grad.copy() for grad in grads])
    return {"totals": totals, "rows": rows, "kept": all(kept), "alive": max(alive), **after_exceptions(run),
            "nested": nested(run), "beside": beside(run), "not_entered": not_entered(run),
            **after_failure(learner, run)}


def after_exceptions(run):
    """What was heard of an exception in no_sync(), and what a backward() gives after it, of arrays that are rank + 1,
    and whether they are that afterwards. For each of two exceptions."""
    found = {"raised": [], "after_exception": np.zeros((2, 2)), "new_kept": True}
    for kind, total in zip((KeyError, KeyboardInterrupt), found["after_exception"], strict=True):
        raised, new = "nothing", np.full(2, run.comm.rank + 1.0)
        tried = run.module.GradientSync(run.comm, [total])
        try:
            with tried.no_sync():
                raise kind("inside")
        except kind:
            raised = kind.__name__
        tried.backward([new])
        found["raised"].append(raised)
        found["new_kept"] &= bool(np.all(new == run.comm.rank + 1.0))
    return found


def nested(run):
    """What backward() gives in the inner of two no_sync(), then in the outer one, there again after an inner one with
    an exception, and behind both."""
    total, found = np.zeros(2), []
    tried = run.module.GradientSync(run.comm, [total])

    def backward():
        tried.backward([np.full(2, run.comm.rank + 1.0)])
        found.append(total.copy())
    with tried.no_sync():
        with tried.no_sync():
            backward()
        backward()
        with suppress(KeyError), tried.no_sync():
            raise KeyError("inside")
        backward()
    backward()
    return np.stack(found)


def not_entered(run):
    """What backward() gives when no_sync() was called, and nobody has entered it."""
    total = np.zeros(2)
    tried = run.module.GradientSync(run.comm, [total])
    waiting = tried.no_sync()
    tried.backward([np.full(2, run.comm.rank + 1.0)])
    del waiting
    return total


def after_failure(learner, run):
    """What was heard of an exception in gradients(), and what backward() gives after it."""
    total, heard = np.zeros(2), "nothing"
    tried = run.module.GradientSync(run.comm, [total])

    def gradients(piece):
        raise KeyError("inside")
    try:
        learner(tried, [np.ones((1, 2))] * 2, gradients, 2)
    except KeyError:
        heard = "KeyError"
    tried.backward([np.full(2, run.comm.rank + 1.0)])
    return {"heard": heard, "after_failure": total}


def beside(run):
    """What backward() gives in no_sync(), after that of another GradientSync; and what the other's gives meanwhile."""
    totals = np.zeros((2, 2))
    tried = run.module.GradientSync(run.comm, [totals[0]])
    with tried.no_sync():
        other = run.module.GradientSync(run.comm, [totals[1]])
        with other.no_sync():
            pass
        for sync in (tried, other):
            sync.backward([np.full(2, run.comm.rank + 1.0)])
    return totals
