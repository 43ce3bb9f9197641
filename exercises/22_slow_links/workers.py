"""22.3 worker by worker, and what known mistakes would give."""

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

SHAPES = [(3, 2), (4,), (1, 5), (4,), ()]
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


# ---------------------------------------------------------------- cases

def job(rng, ranks, samples, every, kind="AdamW", inner_lr=0.05, lr=0.7, momentum=0.9, far=6.0):
    """[this worker's] of a sum of squares for each parameter; each worker pulls to other values, in other strengths.
    samples: [of each step] for each rank. far: how far away these values are."""
    start = [np.array(rng.standard_normal(shape)) for shape in SHAPES]
    pull = rng.uniform(0.5, 1.5, len(SHAPES)).tolist()
    goal = [np.array(far * rng.choice([-1.0, 1.0], shape)) for shape in SHAPES]
    return [{"parameters": start, "every": every, "kind": kind, "inner_lr": inner_lr, "lr": lr, "momentum": momentum,
             "pull": pull, "samples": [int(n) for n in samples[rank]],
             "targets": [[g + (1 + rank) * rng.standard_normal(g.shape) for _ in samples[rank]] for g in goal]}
            for rank in range(ranks)]


def cases(rng, ranks):
    def mostly(steps):
        return rng.integers(1, 9, (ranks, steps))

    def some_idle():
        """In the first round one worker has no sample, in the second it has some at the beginning alone."""
        found = mostly(6)
        if ranks > 1:
            found[1, :3], found[1, 4:] = 0, 0
        return found
    drawn = [[job(rng, ranks, np.full((ranks, 6), 4), 2)], [job(rng, ranks, mostly(7), 3)],
             [job(rng, ranks, some_idle(), 3, lr=0.5, momentum=0.6)],
             [job(rng, ranks, mostly(4), 1, kind="SGD", inner_lr=0.2, lr=1.0, momentum=0.0)],
             [job(rng, ranks, mostly(5), 2, momentum=0.7), job(rng, ranks, mostly(6), 3, kind="SGD", lr=0.9)]]
    return [[{"what": "workers", "jobs": [of[rank] for of in jobs]} for rank in range(ranks)] for jobs in drawn]


# ---------------------------------------------------------------- rightly, and with mistakes

def adamw(p, g, state, steps, lr):
    """(what a step takes away, the state after it)."""
    m, v = state
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g ** 2
    return lr * (m / (1 - 0.9 ** steps) / (np.sqrt(v / (1 - 0.99 ** steps)) + 1e-8) + 0.1 * p), (m, v)


def nesterov(v, delta, lr, momentum, number):
    """(v, what is taken away)."""
    v = momentum * v + delta
    return v, lr * (delta + momentum * v)


def samples(had, in_step, since):
    """A worker's weight."""
    return float(since)


def by_samples(moved, weights):
    return sum(w * d for w, d in zip(weights, moved, strict=True)) / sum(weights)


def at_every(step, every):
    return step % every == 0


def way_gone(start, worker, i):
    return start - worker.p[i]


def all_begin_from(common, own, update, start):
    """(common values, a worker's own) after a meeting."""
    return common - update, common - update


class Worker:
    def __init__(self, mine):
        self.job, self.p, self.steps, self.since, self.had = mine, [x.copy() for x in mine["parameters"]], 0, 0, 0
        self.state = [[np.zeros_like(x)] * 2 for x in self.p] if mine["kind"] == "AdamW" else []
        self.seen, self.begin = [], list(self.p)

    def count(self, step):
        """Have the step's samples, and the gradients by them, at where the worker is."""
        count = self.job["samples"][step]
        self.since, self.had = self.since + count, self.had + count
        self.grads = [pull * (p - target[step]) * (count > 0) for p, pull, target in zip(
            self.p, self.job["pull"], self.job["targets"], strict=True)]

    def inner(self):
        self.steps += 1
        for i, (p, g) in enumerate(zip(self.p, self.grads, strict=True)):
            if self.state:
                away, self.state[i] = adamw(p, g, self.state[i], self.steps, self.job["inner_lr"])
            else:
                away = self.job["inner_lr"] * g
            self.p[i] = p - away

    def keep(self):
        self.seen.append([p.copy() for p in self.p])


def train(jobs, weigh=samples, mean=by_samples, outer=nesterov, due=at_every, after=all_begin_from, sign=1,
          forget=False, lasting=False, state=None, first_only=False, skip=False, before_step=False, inner=1,
          way=way_gone, by_shape=False, by_memory=False, into_copies=False, idle=False):
    """[{"parameters", "state"}] of each worker; the keywords are the mistakes."""
    workers, mine = [Worker(one) for one in jobs], jobs[0]
    common = [x.copy() for x in mine["parameters"]]
    velocity, meetings = [np.zeros_like(x) for x in common], 0
    of = [SHAPES.index(shape) if by_shape else i for i, shape in enumerate(SHAPES)]
    for step in range(len(mine["samples"])):
        meeting = due(step + 1, mine["every"])
        for worker in workers:
            worker.count(step)
            rests = skip and meeting or idle and not worker.job["samples"][step]
            for _ in range(inner * (not before_step and not rests)):
                worker.inner()
        if meeting:
            meetings += 1
            weights = [weigh(w.had, w.job["samples"][step], w.since) for w in workers]
            for i, start in enumerate(common):
                if first_only and i:
                    break
                delta = sign * mean([way(start, w, i) for w in workers], weights)
                if by_memory:       # that of columns
                    delta = np.reshape(np.ravel(delta.T), delta.shape)
                v, update = outer(0 * velocity[of[i]] if forget else velocity[of[i]], delta, mine["lr"],
                                  mine["momentum"], meetings)
                velocity[of[i]] = v
                for w in workers:
                    common[i], w.p[i] = (own_stays if into_copies and not i else after)(start, w.p[i], update, delta)
            for w in workers:
                w.since, w.begin = w.since if lasting else 0, list(w.p)
            if state and workers[0].state:
                state(workers)
        for worker in workers:
            if before_step:
                worker.inner()
            worker.keep()
    return [{"parameters": w.seen, "state": [s for pair in w.state for s in pair]} for w in workers]


RIGHT = {"elsewhere": False, "state elsewhere": False, "grads changed": False}


def run(case, **how):
    """Outputs of all ranks."""
    if case[0]["what"] == "training":
        return [{}] * len(case)
    with np.errstate(all="ignore"):
        jobs = [train(of, **how) for of in zip(*(rank["jobs"] for rank in case), strict=True)]
    return [{"jobs": [of[rank] for of in jobs], "wrong": [RIGHT] * len(jobs)} for rank in range(len(case))]


def truth(case):
    return run(case)


# ---------------------------------------------------------------- mistakes

def d(text, **how):
    return gives(text, lambda case: run(case, **how))


def told(name):
    return lambda case, got: any(of[name] for rank in got for of in rank["wrong"])


def plain_sum(moved, weights):
    return sum(moved)


def squared(moved, weights):
    return sum(w * w * d for w, d in zip(weights, moved, strict=True)) / sum(weights)


def plain_mean(moved, weights):
    return sum(moved) / len(moved)


def weighed_sum(moved, weights):
    return sum(w * d for w, d in zip(weights, moved, strict=True))


def over_ranks(moved, weights):
    return weighed_sum(moved, weights) / len(moved)


def heavy_ball(v, delta, lr, momentum, number):
    v = momentum * v + delta
    return v, lr * v


def no_momentum(v, delta, lr, momentum, number):
    return v, lr * delta


def only_mean(v, delta, lr, momentum, number):
    return v, delta


def dampened(v, delta, lr, momentum, number):
    v = momentum * v + (1 - momentum) * delta
    return v, lr * (delta + momentum * v)


def lr_once_more(v, delta, lr, momentum, number):
    v = momentum * v + lr * delta
    return v, lr * (delta + momentum * v)


def lr_on_v_alone(v, delta, lr, momentum, number):
    v = momentum * v + lr * delta
    return v, delta + momentum * v


def outer_adam(v, delta, lr, momentum, number):
    v = momentum * v + (1 - momentum) * delta
    return v, lr * v


def no_lr(v, delta, lr, momentum, number):
    v = momentum * v + delta
    return v, delta + momentum * v


def always(lr=None, momentum=None):
    """With one setting, whatever was asked for."""
    return lambda v, delta, asked, given, number: nesterov(v, delta, lr or asked, momentum or given, number)


def last_gradient(start, worker, i):
    return worker.grads[i]


def from_own_beginning(start, worker, i):
    """Each worker's since it began itself, wherever that was."""
    return worker.begin[i] - worker.p[i]


def not_looking_ahead(v, delta, lr, momentum, number):
    """v where Δ + momentum · v is asked for, twice the momentum."""
    v = momentum * v + delta
    return v, lr * (delta + v)


def from_where_it_is(common, own, update, delta):
    """The step is taken from the worker's own values."""
    return common - update, own - update


def common_stays(common, own, update, delta):
    return common, common - update


def own_stays(common, own, update, delta):
    return common - update, own


def common_is_mean(common, own, update, delta):
    """The next difference is taken from where the workers were on average."""
    return common - delta, common - update


def new_state(workers):
    for worker in workers:
        worker.state = [[np.zeros_like(s) for s in pair] for pair in worker.state]


def mean_state(workers):
    for i, pair in enumerate(workers[0].state):
        means = [sum(w.state[i][k] for w in workers) / len(workers) for k in range(len(pair))]
        for worker in workers:
            worker.state[i] = list(means)


def nan(case, got):
    return any(np.isnan(x).any() for rank in got for of in rank["jobs"] for one in of["parameters"] for x in one)


def near(case, got):
    return all(same(np.asarray(x), np.asarray(y), 1e-4) for rank, right in zip(got, truth(case), strict=True)
               for of, theirs in zip(rank["jobs"], right["jobs"], strict=True)
               for one, other in zip(of["parameters"], theirs["parameters"], strict=True)
               for x, y in zip(one, other, strict=True))


SIGNATURES = [
    when("another array has been put into parameters: the model reads those that were there, so write into them "
         "(p[...] = …)", told("elsewhere")),
    when("inner.state is no longer the arrays that it was: the inner optimizer's memory is the worker's own, and stays",
         told("state elsewhere")),
    when("grads aren't what they were before the call", told("grads changed")),
    when("nan: a worker without samples divides by its own number, which is 0. Divide by that of all", nan),
    when("they never meet: nothing is sent", lambda case, got: not any(rank.calls for rank in got)),
    d("only the first of the parameters is averaged", first_only=True),
    d("the sign of the outer gradient: an optimizer goes against what it gets, so a parameter that all have lowered "
      "must have an outer gradient above 0, start - own", sign=-1),
    d("inner.step isn't called: between meetings nobody moves", inner=0),
    d("inner.step is called twice in each step", inner=2),
    d("lr is 0.7 whatever was asked for", outer=always(lr=0.7)),
    d("momentum is 0.9 whatever was asked for", outer=always(momentum=0.9)),
    d("the last step's gradients are averaged, not how far the workers have come in all H steps", way=last_gradient),
    d("the workers' ways are added up; asked for is their mean, by samples", mean=plain_sum),
    d("mean of means: a worker that has had more samples weighs more. In a round they have had different numbers",
      mean=plain_mean),
    d("the workers' samples are in it twice: each way is multiplied by them once", mean=squared),
    d("weighed by samples, and not divided by the number of samples of all", mean=weighed_sum),
    d("weighed by samples, but divided by the number of ranks instead of all samples", mean=over_ranks),
    d("a worker's weight is the number of its samples in the last step: it is that of the whole round",
      weigh=lambda had, in_step, since: max(float(in_step), 1e-300)),
    d("a worker's weight is the number of its samples since the beginning: it is that since the last meeting; set it "
      "to 0 there", lasting=True),
    d("the inner optimizer's memory is set to 0 at each meeting: it is the worker's own, and stays", state=new_state),
    d("the inner optimizer's memory is averaged: it is the worker's own, and stays where it is (and would be twice as "
      "many bytes again)", state=mean_state),
    d("the outer step has no momentum", outer=no_momentum),
    d("all take the mean of where they are: that is the outer step with lr = 1 and without momentum",
      outer=only_mean),
    d("momentum, but not Nesterov's: the step is lr · v here, where lr · (Δ + momentum · v) is asked for, with the v "
      "that has this Δ in it", outer=heavy_ball),
    d("the step is lr · (Δ + v): the v in it is multiplied by momentum once more", outer=not_looking_ahead),
    d("Δ is multiplied by 1 - momentum on its way into v: that is Adam's mean, not SGD's momentum", outer=dampened),
    d("v is an average here, as Adam's m, and the step is lr · v", outer=outer_adam),
    d("lr is in v and in the step: it belongs to the step alone", outer=lr_once_more),
    d("lr is in v, but Δ in the step is without it", outer=lr_on_v_alone),
    d("the outer step has no lr", outer=no_lr),
    d("the velocity begins with 0 at each meeting: keep it from one to the next", forget=True),
    d("the outer step is made from where each worker is: it begins where all began, so that all are together after "
      "it", after=from_where_it_is),
    d("the outer step is made from where each worker is, and that is remembered as its beginning: all begin at one "
      "place, with the outer step made from there", way=from_own_beginning, after=from_where_it_is),
    d("inner.step isn't called in steps without samples: each worker makes H steps from one meeting to the next, with "
      "gradients of 0 if need be", idle=True),
    d("where all began is remembered from the very beginning: after a meeting all begin somewhere else",
      after=common_stays),
    d("the outer step is written into a copy of parameters[0], which lies in memory by columns: its p.ravel() and "
      "p.reshape(-1) are copies. p[...] = … writes into p", into_copies=True),
    d("the numbers of parameters[0], which lies in memory by columns, have changed places: ravel(\"K\") takes them as "
      "they lie there, and reshape puts them row by row", by_memory=True),
    d("parameters of one shape share a velocity: each has its own", by_shape=True),
    d("a meeting leaves the worker where it is. Either the outer gradient is 0, since what was kept of the beginning "
      "are the very arrays that train (copy them); or what comes of the outer step isn't written into parameters",
      after=own_stays),
    d("the next outer gradient is measured from the workers' mean: all begin from where the outer step has led",
      after=common_is_mean),
    d("the first meeting comes after H + 1 steps, the next after 2H + 1: count the step that was just made", due=lambda
      step, every: step > 1 and (step - 1) % every == 0),
    d("the meetings are one step too early: the first after H steps, not H - 1", due=lambda step, every:
      (step + 1) % every == 0),
    d("they meet after the first step, and then every H: the first meeting is after H", due=lambda step, every:
      (step - 1) % every == 0),
    d("they meet after every step", due=lambda step, every: True),
    d("they meet once, after H steps, and then never again", due=lambda step, every: step == every),
    d("they meet before the step that they should meet after: the inner step comes first", before_step=True),
    d("in the step of a meeting there is no inner step: H inner steps, and then the meeting", skip=True),
    when("nearly right: is something sent in float32, or a small number added before a division?", near),
]


def meetings(case):
    return sum(len(of["samples"]) // of["every"] for of in case[0]["jobs"])


def handed(got):
    return max(sum(call["bytes"] for call in rank.calls) for rank in got) // 8


def most_calls(got):
    return max(len(rank.calls) for rank in got)


DEMANDS = [
    demand(lambda case, got: f"the right numbers, but with {most_calls(got)} all-reduces in {meetings(case)} meetings: "
                             "one of all parameters behind each other, and at most one more, of samples",
           lambda case, got: case[0]["what"] != "workers" or most_calls(got) <= 2 * meetings(case)),
    demand(lambda case, got: f"the right numbers, but {handed(got)} of them were handed to all-reduces in "
                             f"{meetings(case)} meetings of {SIZE} parameters",
           lambda case, got: case[0]["what"] != "workers" or handed(got) <= meetings(case) * (SIZE + len(got) + 1)),
]
