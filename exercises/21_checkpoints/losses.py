"""21.5: the run event by event, and what known mistakes give."""

import math

import numpy as np

from exercises.frame import gives, when

PAUSE, BEHIND, RESTART, MTBF = 60.0, 60.0, 300.0, 4 * 3600.0
ASYNC = {"pause": 5.0, "behind": 90.0}
DAYS = 2 * 86400.0


def formula(rng):
    return {"what": "formula", "pairs": np.concatenate([[[PAUSE, MTBF]], rng.uniform((1, 1000), (100, 50000), (6, 2))])}


def cases(rng):
    """Short runs with few failures: some before the first save, some while one is under way, several in a row."""
    return [{"what": "simulate", "work": 100 + rng.random(), "pause": 3 + rng.random(), "restart": 20 + rng.random(),
             "behind": 9 + rng.random(), "intervals": [10.0 + rng.random(), 33.3 + rng.random(), 150.0],
             "uptimes": [[], [2.0 + rng.random()], [38.0 + rng.random()], [41.0 + rng.random(), 7.0, 52.5],
                         rng.exponential(60, 6).tolist(), [50.0 + 3 * i + rng.random() for i in range(8)]]},
            {"what": "simulate", "work": 90.0, "pause": 4.0, "behind": 4.0, "restart": 0.0, "intervals": [30.0, 45.0],
             "uptimes": [[], [31.0], [33.5], [50.0], [98.0], [94.0], [34.0], [2.0, 2.0, 70.0],
                         rng.exponential(60, 6).tolist()]}]


def experiments(rng):
    """A run of two days, several times, at many intervals: one that waits for each save, and one that writes beside."""
    count, several = 60, 10
    case = {"what": "simulate", "work": DAYS, "pause": PAUSE, "behind": BEHIND, "restart": RESTART,
            "intervals": np.geomspace(150, 12000, 14).tolist(),
            "uptimes": rng.exponential(MTBF, (several, count)).tolist()}
    return [case, case | ASYNC]


# ---------------------------------------------------------------- one event after the other

def events(work, interval, pause, behind, restart, uptimes, half=False, restarts=True, counts_at_begin=False,
           all_kept=False, behind_ignored=False, behind_later=False, nothing_kept=False, pause_is_work=False,
           pause_is_training=False, saved_forgotten=False, no_pauses=False, below_0=False, last_only=False):
    """The run as a list of things that happen one after the other. The keywords are mistakes."""
    seconds = lost = saved = 0.0
    pause = 0.0 if no_pauses else pause
    for uptime in [*uptimes, math.inf]:
        clock, done, checkpoints, since = 0.0, saved, [], 0.0
        while True:
            stretch = min(interval - since, work - done)
            clock, done, since = clock + stretch, done + stretch, since + stretch
            if done >= work - 1e-12 * work:
                break
            if clock > uptime:
                break
            wait = 0.0 if counts_at_begin else pause if behind_ignored else behind + pause * behind_later
            checkpoints.append((clock + wait, done))
            clock, since = clock + pause, 0.0
            if clock > uptime:
                break
        if clock <= uptime:
            return seconds + clock, lost
        trained = done - saved - (max(0.0, clock - uptime) if since else 0.0)
        trained = uptime if pause_is_training else trained
        counted = [holds for when, holds in checkpoints if when <= uptime]
        kept = counted[-1] if counted else saved
        kept = saved + trained if all_kept else saved if nothing_kept else kept
        if below_0 and uptime + pause < behind:
            kept -= interval
        gone = saved + trained - kept
        lost = 0.0 if last_only else lost
        lost += interval / 2 if half else uptime if pause_is_work else gone
        saved = kept - saved if saved_forgotten else kept
        seconds += uptime + (restart if restarts else 0.0)


def simulated(case, **how):
    given = {name: case[name] for name in ("work", "pause", "behind", "restart")}
    found = [events(interval=every, uptimes=uptimes, **given, **how)
             for every in case["intervals"] for uptimes in case["uptimes"]]
    return {"seconds": np.array([seconds for seconds, _ in found]), "lost": np.array([lost for _, lost in found])}


KNOWN = {}      # a case is asked for once per signature


def truth(case):
    if case["what"] == "formula":
        return {"result": [math.exp(0.5 * (math.log(2) + math.log(pause) + math.log(mtbf)))
                           for pause, mtbf in case["pairs"].tolist()]}
    key = case["work"], case["pause"], case["behind"], *case["uptimes"][-1]
    if key not in KNOWN:
        if len(KNOWN) > 200:
            KNOWN.clear()
        KNOWN[key] = simulated(case)
    return KNOWN[key]


def young(function):
    return lambda case: {"result": [float(function(*pair)) for pair in case["pairs"].tolist()]} \
        if case["what"] == "formula" else None


def s(sentence, **how):
    def outputs(case):
        return simulated(case, **how) if case["what"] == "simulate" else None
    return gives(sentence, outputs)


def ends_with_save(case, got):
    """Whether runs that no failure meets are one pause too long, if any are too long."""
    if case["what"] != "simulate":
        return False
    longer = [got["seconds"][i] - truth(case)["seconds"][i] for i in range(len(got["seconds"]))
              if not case["uptimes"][i % len(case["uptimes"])]]
    return all(min(abs(one), abs(one - case["pause"])) < 1e-6 for one in longer) and (max(longer, default=1) > 0)


def counts(work, interval, pause, behind, restart, uptimes, cycle=lambda interval, pause, behind: interval + pause,
           standing=lambda saves, pause, behind: saves * pause, later=lambda needed, uptime: needed <= uptime,
           in_time=lambda seconds, cycle: seconds // cycle, step=lambda interval, cycle: interval,
           trained=lambda cycles, rest, interval, uptime: cycles * interval + min(rest, interval),
           gone=lambda trained, kept, interval, pause, restart: trained - kept, left=lambda work, saved: work - saved,
           since=lambda uptime, seconds: uptime, total=lambda seconds, work, lost: seconds,
           pauses=lambda number, restart: restart):
    """The run by arithmetic, uptime by uptime; the keywords are mistakes."""
    seconds, lost, saved, whole = 0.0, 0.0, 0.0, cycle(interval, pause, behind)
    for number, uptime in enumerate([*uptimes, math.inf]):
        uptime = since(uptime, seconds)
        rest = left(work, saved)
        needed = rest + standing(math.ceil(rest / interval) - 1, pause, behind)
        if later(needed, uptime):
            return total(seconds + needed, work, lost), lost
        kept = max(0, in_time(uptime + pause - behind, whole)) * step(interval, whole)
        done = trained(*divmod(uptime, whole), interval, uptime)
        saved, lost = saved + kept, lost + gone(done, kept, interval, pause, restart)
        seconds += uptime + pauses(number, restart)
    return None


def counted(case, **how):
    """The outputs; None where the mistake finds no end."""
    if case["what"] != "simulate":
        return None
    given = {name: case[name] for name in ("work", "pause", "behind", "restart")}
    found = [counts(interval=every, uptimes=uptimes, **given, **how)
             for every in case["intervals"] for uptimes in case["uptimes"]]
    return None if None in found else {"seconds": np.array([seconds for seconds, _ in found]),
                                       "lost": np.array([lost for _, lost in found])}


def a(sentence, **how):
    return gives(sentence, lambda case: counted(case, **how))


COUNTED = [
    gives("the result is rounded down to whole seconds: nothing is rounded here",
          young(lambda c, m: math.floor(math.sqrt(2 * c * m)))),
    gives("the 2 stands before the root: it is under it, √(2 · pause · MTBF)",
          young(lambda c, m: 2 * math.sqrt(c * m))),
    a("from saves on the way to the end no time passes: each of them stands still for `pause` seconds, between "
      "failures as well as after the last", standing=lambda saves, pause, behind: 0),
    a("training stands still for `behind` seconds at each save on the way to the end: it does for `pause`; what is "
      "written beside it takes no time", standing=lambda saves, pause, behind: saves * behind),
    a("the run ends when its last checkpoint counts: it ends when the work is done",
      standing=lambda saves, pause, behind: saves * pause + behind),
    a("a run that is done at the moment of the failure goes on: what is done when the machine fails is done",
      later=lambda needed, uptime: needed < uptime),
    a("a checkpoint that counts from the moment of the failure on is left out: it counts",
      in_time=lambda seconds, cycle: math.ceil(seconds / cycle) - 1),
    a("one checkpoint at the most is kept of each uptime: the newest that counts may be the third or the tenth",
      in_time=lambda seconds, cycle: min(1, seconds // cycle)),
    a("the pauses are kept as if they were training: a checkpoint holds an interval more than the one before it",
      step=lambda interval, cycle: cycle),
    a("a save comes every `interval` seconds here, pause included: it comes after `interval` seconds of training, so "
      "every interval + pause", cycle=lambda interval, pause, behind: interval),
    a("a save comes every interval + behind seconds here: training goes on after `pause`, before the checkpoint counts",
      cycle=lambda interval, pause, behind: interval + behind),
    a("a failure in a pause takes part of the pause away as if it were training: of a cycle at most an interval is",
      trained=lambda cycles, rest, interval, uptime: cycles * interval + rest),
    a("the interval under way when the machine fails isn't lost here: it is done again as well",
      trained=lambda cycles, rest, interval, uptime: cycles * interval),
    a("all that was trained since the restart is lost here, what was saved included: lost is what was trained less "
      "what is kept", gone=lambda trained, kept, interval, pause, restart: trained),
    a("the restarts are counted as lost training: they take time, and no training is done again for them",
      gone=lambda trained, kept, interval, pause, restart: trained - kept + restart),
    a("what is left is all the work after each failure here: what was saved is done", left=lambda work, saved: work),
    a("uptimes are taken for moments since the beginning: each begins anew, at the restart's end",
      since=lambda uptime, seconds: uptime - seconds),
    a("the time is the work and what was lost alone: the pauses and the restarts take time, too",
      total=lambda seconds, work, lost: work + lost),
    a("only the first restart takes time: each takes `restart` seconds",
      pauses=lambda number, restart: restart if number == 0 else 0.0),
    when("(lost, seconds) for (seconds, lost): the time comes first", lambda case, got: case["what"] == "simulate" and
         all(np.allclose(got[name], truth(case)[other]) for name, other in (("seconds", "lost"), ("lost", "seconds")))),
]
SIGNATURES = [
    gives("the 2 is missing: a failure loses half an interval, and the sum of pause/T and T/(2 MTBF) is least at "
          "√(2 · pause · MTBF)", young(lambda c, m: math.sqrt(c * m))),
    gives("the 2 is on the wrong side: √(pause · MTBF / 2)", young(lambda c, m: math.sqrt(c * m / 2))),
    gives("the root is missing", young(lambda c, m: 2 * c * m)),
    gives("√(pause / MTBF) is no time: T is least lossy where pause/T² = 1/(2 MTBF)",
          young(lambda c, m: math.sqrt(2 * c / m))),
    gives("√(pause / MTBF) is no time: T is least lossy where pause/T² = 1/(2 MTBF)",
          young(lambda c, m: math.sqrt(2 * m / c))),
    gives("that is Young's formula less the pause: here the interval is of training alone, from the end of one save to "
          "the begin of the next", young(lambda c, m: math.sqrt(2 * c * m) - c)),
    gives("that is Young's formula and the pause: here the interval is of training alone",
          young(lambda c, m: math.sqrt(2 * c * m) + c)),
    gives("the logarithm's formula is of something else: asked for is the first order, √(2 · pause · MTBF)",
          young(lambda c, m: math.sqrt(2 * c * (m + c)))),
    s("the restarts take no time here: each takes `restart` seconds", restarts=False),
    s("a checkpoint counts `behind` seconds after its pause: that begins when the pause ends, and it begins when the "
      "save does", behind_later=True),
    s("a failure before the first checkpoint counts takes less than nothing away: what was done then is 0, not "
      "less",
      below_0=True),
    s("the pauses take no time", no_pauses=True),
    s("the pauses are counted as training: what is lost is training alone", pause_is_training=True),
    s("what was saved before the last failure is forgotten: a run goes on from a checkpoint, and adds to it",
      saved_forgotten=True),
    s("only the last failure's loss is told: all of them add up", last_only=True),
    s("a checkpoint counts as soon as it has begun: it counts `behind` seconds later", counts_at_begin=True),
    s("a checkpoint counts when training goes on: it counts `behind` seconds after the save has begun, and the machine "
      "may fail meanwhile", behind_ignored=True),
    s("nothing is lost by a failure: what was trained since the newest checkpoint that counts must be done again",
      all_kept=True),
    s("every failure sends the run back to its beginning: it goes back to the newest checkpoint that counts",
      nothing_kept=True),
    s("half an interval is lost by each failure: that is the average; here it is known what was lost", half=True),
    s("the uptime is lost, pauses and what was saved included: lost is the training that is done again",
      pause_is_work=True),
    *COUNTED,
    when("the run ends with a save, when all work is done: nobody will read that", ends_with_save),
]
