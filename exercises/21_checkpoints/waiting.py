"""How 21.4's answers are called: with a `write` that ends when it is let go.

No verdict hangs on how fast the machine is. What must come is waited for, as long as need be; only that something does
not come is seen by a pause, and when a pause was too short, a wrong answer passes that try, and no right one fails.
"""

import _thread
import builtins
import threading

import numpy as np

PAUSES = (0.03, 0.06, 0.12)     # seconds in which a save or a wait that doesn't wait returns
STUCK = 3.0         # after which a save that hasn't returned waits for its write
GRACE = 0.5         # for what no right answer depends on
LIMIT = 10.0        # for what must come: only an answer that hangs takes so long
POLL = 0.005


class Slow:
    """The `write` that a Writer is given: it ends when it is let go, and raises where it should.

    fails   {step: what it raises}
    events  what happened, in order: "write 2 begins", "save 3 returns", …
    free    the steps that are let go, or None: all are
    """

    def __init__(self, fails=None, free=()):
        self.fails, self.free, self.events, self.written, self.threads = fails or {}, free, [], [], []
        self.change, self.main = threading.Condition(), threading.get_ident()

    def __call__(self, step, state):
        aside = threading.get_ident() != self.main
        self.threads.append(aside)
        self.note(f"write {step} begins")
        if aside:
            self.until(lambda: self.free is None or step in self.free)
        if step in self.fails:
            self.note(f"write {step} fails")
            raise self.fails[step](f"step {step}: the disk is full")
        self.written.append([step, plain(state)])
        self.note(f"write {step} ends")

    def note(self, event):
        with self.change:
            self.events.append(event)
            self.change.notify_all()

    def let_go(self, *steps):
        """These, or all."""
        with self.change:
            self.free = None if not steps or self.free is None else {*self.free, *steps}
            self.change.notify_all()

    def until(self, holds, limit=2 * LIMIT):
        """Wait, in small steps, each of which is longer on a machine that is busy: whether it holds in the end."""
        step = max(POLL, limit / 60)
        with self.change:
            while not (found := self.change.wait_for(holds, step)) and limit > step:
                limit -= step
        return found

    def seen(self, *events, limit=LIMIT):
        """Wait until one of them has happened: whether it has. Without threads nothing more will happen."""
        def happened():
            return any(event in self.events for event in events)
        quiet = most = limit / 20
        while not (found := self.until(happened, POLL)) and min(quiet, limit) > 0:
            quiet, limit = most if answers_threads() else quiet - POLL, limit - POLL
        return found

    def say(self, what, function, *inputs):
        """Call, and note when it returned, or what it raised: "", or that."""
        try:
            function(*inputs)
            raised = ""
        except NotImplementedError:
            raise
        except (Exception, SystemExit) as error:
            raised = f"{type(error).__name__}: {error}"
        self.note(f"{what} raises {raised}" if raised else f"{what} returns")
        return raised

    def over(self, what):
        """Whether this call has returned, or raised."""
        return any(event.startswith((f"{what} returns", f"{what} raises")) for event in self.events)


class Aside(threading.Thread):
    """A thread of ours, while the main one is in a call of the answer."""

    def __init__(self, target):
        super().__init__(target=target, daemon=True)
        self.start()


def answers_threads():
    """How many threads the answer has."""
    return _thread._count() - sum(isinstance(one, Aside) for one in threading.enumerate())


class Watched(dict):
    """A state that notes whether another thread than the main one looks into it."""

    others = False

    def items(self):
        self.others |= threading.current_thread() is not threading.main_thread()
        return dict.items(self)

    def __iter__(self):
        self.others |= threading.current_thread() is not threading.main_thread()
        return dict.__iter__(self)

    def __getitem__(self, name):
        self.others |= threading.current_thread() is not threading.main_thread()
        return dict.__getitem__(self, name)

    def keys(self):
        return list(iter(self))

    def __reduce_ex__(self, protocol):      # copy and pickle make a dict of it: this class is no module's
        return dict, (), None, None, iter(self.items())


def plain(value):
    """A copy of a state, of plain dicts and lists."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in dict.items(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return np.array(value) if isinstance(value, np.ndarray) else value


def Writer(learner, inputs, run):
    threading.excepthook = say_it
    return {"beside": beside, "one": one_at_a_time, "fails": fails, "two": two_writers,
            "late": late}[inputs["what"]](learner, inputs)


def say_it(died):
    """Of a thread that an exception has ended. (The usual hook reads the stack's lines from this file, which an answer
    may not touch.)"""
    print(f"in a thread: {died.exc_type.__name__}: {died.exc_value}")


def beside(learner, inputs):
    """Save, and go on training before the write has ended."""
    write, state = Slow(), Watched(plain(inputs["state"]))
    writer = learner(write)
    write.say("wait", writer.wait)
    saved(write, writer, 1, state, STUCK)
    begun = write.seen("write 1 begins")
    for array in (state["w"], state["adam"]["m"], state["adam"]["more"][0], state["adam"]["more"][2]["slow"]):
        array += 1
    dict.__setitem__(state, "step", 99)
    state["adam"]["more"].append(3)
    early = not comes(write.events, "write 1 ends", "save 1 returns")
    write.let_go()
    write.say("wait", writer.wait)
    found = {"calls": calls_of(write.events), "written": list(write.written), "beside": list(write.threads),
             "others": bool(state.others), "early": early}
    waited = begun and early and all(waits(learner, inputs["state"], pause) for pause in PAUSES)
    return found | {"waited": waited}


def saved(write, writer, step, state, stuck):
    """Save. A save that waits for its own write would wait for ever: after `stuck` seconds all are let go."""
    def guard():
        if write.until(lambda: f"write {step} begins" in write.events or write.over(f"save {step}")):
            if write.until(lambda: write.over(f"save {step}"), stuck):
                return
        write.let_go()
    guarding = Aside(guard)
    raised = write.say(f"save {step}", writer.save, step, state)
    guarding.join()
    return raised


def waits(learner, state, pause):
    """Whether wait returns after the write, which goes on a while after wait was called."""
    write = Slow()
    writer = learner(write)
    saved(write, writer, 1, plain(state), STUCK)
    write.seen("write 1 begins")

    def release():
        write.until(lambda: write.over("wait"), pause)
        write.let_go()
    releasing = Aside(release)
    write.say("wait", writer.wait)
    found = list(write.events)
    releasing.join()
    return found[-1] == "wait returns" and "write 1 ends" in found


def comes(events, first, then):
    """Whether both come, and in this order."""
    return first in events and then in events and events.index(first) < events.index(then)


def calls_of(events):
    return [event for event in events if event.startswith(("save", "wait"))]


def one_at_a_time(learner, inputs):
    """Save again and again; each write goes on a while after the next save was called."""
    write, state, count = Slow(), plain(inputs["state"]), inputs["saves"]
    writer = learner(write)
    for step in range(1, count + 1):
        state["w"][...] = step
        releasing = Aside(lambda step=step: release(write, step))
        saved(write, writer, step, state, GRACE)
        releasing.join()
        write.seen(f"write {step} begins", limit=GRACE)
    write.let_go()
    write.say("wait", writer.wait)
    write.until(lambda: len(write.written) >= count or not answers_threads(), GRACE)    # if nobody waits for them
    pairs = [(a, b) for b in range(2, count + 1) for a in range(1, b)]
    return {"written": [[step, float(state["w"].ravel()[0])] for step, state in write.written],
            "calls": calls_of(write.events),
            "together": [b for a, b in pairs if comes(write.events, f"write {b} begins", f"write {a} ends")],
            "unwaited": [b for a, b in pairs if comes(write.events, f"save {b} returns", f"write {a} ends")]}


def release(write, step):
    """Let the write before this one go, when save has had time to return, and this one to begin."""
    if step > 1:
        write.until(lambda: write.over(f"save {step}") or f"write {step} begins" in write.events,
                    PAUSES[step % len(PAUSES)])
        if write.over(f"save {step}"):      # it hasn't waited: does its write? That much is found, and no more asked
            write.seen(f"write {step} begins", limit=GRACE)
            write.let_go()
        write.let_go(step - 1)


def fails(learner, inputs):
    """Some writes raise. script: what is called, in order."""
    kinds = [getattr(builtins, name) for name in inputs["raised"]]
    write, state = Slow(dict(zip(inputs["steps"], kinds, strict=True)), free=None), plain(inputs["state"])
    writer, pause = learner(write), PAUSES[-1]
    for call in inputs["script"]:
        if call == "wait":
            write.say("wait", writer.wait)
        elif not write.say(f"save {call}", writer.save, call, state):
            write.seen(f"write {call} ends", f"write {call} fails", limit=GRACE)
            if not write.until(lambda: not answers_threads(), pause):
                pause = POLL        # its threads stay
    return {"calls": calls_of(write.events), "written": [step for step, _ in write.written]}


def late(learner, inputs):
    """A write fails while wait, or the next save, waits for it; then wait once more."""
    calls = []
    for what, step in (("wait", None), ("save 2", 2)):
        write, state = Slow({1: OSError}), plain(inputs["state"])
        writer = learner(write)
        saved(write, writer, 1, state, GRACE)
        write.seen("write 1 begins", limit=GRACE)

        def release(write=write, what=what):
            write.until(lambda: write.over(what), PAUSES[-1])
            write.let_go()
        releasing = Aside(release)
        write.say(what, *((writer.save, step, state) if step else (writer.wait,)))
        releasing.join()
        write.say("wait", writer.wait)
        calls.append(calls_of(write.events))
    return {"calls": calls}


def two_writers(learner, inputs):
    """Two of them: one whose first write goes on, and then fails, while the other one saves."""
    held, other = Slow({1: OSError}), Slow(free=None)
    writers = {slow: learner(slow) for slow in (held, other)}

    def call(slow, step=None):
        if step is None:
            slow.say("wait", writers[slow].wait)
        else:
            slow.say(f"save {step}", writers[slow].save, step, plain(inputs["state"]))

    def guard():        # one that waits for the held one's write would wait for ever
        if not other.until(lambda: other.over("wait"), STUCK):
            held.let_go()
    saved(held, writers[held], 1, plain(inputs["state"]), STUCK)
    guarding = Aside(guard)
    call(other, 1)
    call(other)
    apart = "write 1 fails" not in held.events
    guarding.join()
    held.let_go()
    held.seen("write 1 fails", limit=GRACE)
    held.until(lambda: not answers_threads(), PAUSES[-1])
    for slow, step in ((other, 2), (held, 2), (held, None), (other, None)):
        call(slow, step)
    return {"apart": apart, "calls": [calls_of(slow.events) for slow in (held, other)],
            "written": [[step for step, _ in slow.written] for slow in (held, other)]}
