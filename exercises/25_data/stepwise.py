"""How 25.5's answers are called: a loop asks for batches of an iterator whose reads go on when they are let go.

No verdict hangs on how fast the machine is. What must come is waited for as long as any thread moves. That something
doesn't come is known when none does: the system counts how often it has given each a processor.
"""

import _thread
import builtins
import math
import os
import queue
import re
import sys
import threading
import time
import weakref

import numpy as np

POLL = 0.001            # seconds between two looks at what the threads do
SOON = 2, 20            # looks: at so many no thread has moved, and nothing more will come; or all that are made
WAITS = 3, 1000         # until a call that waits does so
A_WHILE = 120, 120      # for what gives up waiting
LATE = 500, 10000      # for what must come: only an answer that is wrong takes so long


class Stuck(Exception):
    """What must come doesn't."""


class Aside(threading.Thread):
    """A thread of ours, which does what it is told. If that never returns, nobody is held up."""

    def __init__(self):
        super().__init__(daemon=True)
        self.work = queue.SimpleQueue()
        self.start()

    def run(self):
        while (task := self.work.get()) is not None:
            task()
            del task


def answers_threads():
    """How many threads the answer has."""
    return _thread._count() - sum(isinstance(one, Aside) for one in threading.enumerate())


def moves():
    """What changes whenever a thread but this one has had a processor. Where the system doesn't tell, always."""
    found = {}
    for name in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else [None]:
        try:
            with open(f"/proc/self/task/{name}/status") as file:
                status = file.read()
        except OSError:        # it has just ended, or there is no such file
            status = ""
        if name != str(threading.get_native_id()):
            found[name] = "State:\tS" in status and re.findall(r"ctxt_switches:\t(\d+)", status) or object()
    return found


class Events(list):
    """What has happened, in order: [who, number, what]."""

    def __init__(self):
        super().__init__()
        self.change = threading.Condition()

    def note(self, *event):
        with self.change:
            self.append(list(event))
            self.change.notify_all()

    def settle(self, holds=lambda: False, looks=SOON):
        """Wait until it holds, or until nothing has moved for so long; whether it holds."""
        still, most = looks
        quiet, before = 0, None
        for _ in range(most):
            with self.change:
                if self.change.wait_for(holds, POLL):
                    return True
            now = moves()
            quiet, before = quiet + 1 if now == before else 0, now
            if quiet >= still:
                break
        return holds()

    def must(self, holds, *otherwise):
        """Wait until it holds; else that is noted."""
        if not self.settle(holds, LATE):
            self.note(*otherwise)
            raise Stuck


class Reader:
    """The iterator: its batches, or what it raises in place of them. So many reads are free, the next one waits."""

    def __init__(self, events, batches, fails=None, free=0):
        self.events, self.batches, self.fails, self.free = events, batches, fails or {}, free
        self.last = min([len(batches), *self.fails])      # read: no later one waits
        self.begun, self.reading, self.arrays = 0, 0, {}

    def __iter__(self):
        return self

    def __next__(self):
        with self.events.change:
            number, self.begun, self.reading = self.begun, self.begun + 1, self.reading + 1
            if isinstance(threading.current_thread(), Aside):
                self.events.note("read", number, "begins in the loop's own thread")
                self.free = max(self.free, number + 1)      # else it would wait for itself
            else:
                self.events.note("read", number, "begins")
            self.events.change.wait_for(lambda: number < self.free or number > self.last)
            self.reading -= 1
            if number in self.fails:
                self.events.note("read", number, "fails")
                raise self.fails[number]
            if number >= len(self.batches):
                self.events.note("read", number, "finds the end")
                raise StopIteration
            batch = self.batches[number]
            if isinstance(batch, np.ndarray):       # made when it is read: we keep none
                batch = batch.copy()
                self.arrays[number] = weakref.ref(batch)
            self.events.note("read", number, "ends")
        return batch

    def let_go(self, count=math.inf):
        with self.events.change:
            self.free = max(self.free, count)
            self.events.change.notify_all()

    def done(self, count):
        """Whether so many reads have ended, and none goes on; or more have begun."""
        return self.begun > count or self.begun == count and not self.reading

    def alive(self, count):
        """How many arrays of the first `count` batches somebody still has."""
        return sum(array() is not None for number, array in self.arrays.items() if number < count)

    def told(self, got, asked):
        """Which batch it is, if it is one."""
        for number in [asked, *range(len(self.batches))]:
            batch = self.arrays[number]() if number in self.arrays else self.batches[number:][:1]
            if got is batch or isinstance(batch, list) and batch and got is batch[0]:
                return f"gives batch {number}"
        same = [number for number, batch in enumerate(self.batches) if isinstance(batch, np.ndarray)
                and isinstance(got, np.ndarray) and np.array_equal(batch, got)]
        return f"gives a copy of batch {same[0]}" if same else f"gives {type(got).__name__}"


class Loop:
    """What asks for batches: a call at a time, in a thread of ours."""

    def __init__(self, learner, batches, depth, **how):
        self.events, self.before = Events(), answers_threads()
        self.reader = Reader(self.events, batches, **how)
        self.learner, self.depth, self.thread = learner, depth, Aside()
        self.asked, self.made, self.iterator, self.batch = 0, None, None, None

    def begin(self, who, number, function):
        """Call it, and go on."""
        self.current, self.over, self.raised = (who, number), False, None
        self.events.note(who, number, "begins")

        def task():
            try:
                said = function()
            except StopIteration:
                said = "ends"
            except BaseException as error:
                which = [number for number, known in self.reader.fails.items() if error is known]
                said = f"raises the error of read {which[0]}" if which else f"raises {type(error).__name__}: {error}"
                self.raised = error if isinstance(error, NotImplementedError) else None
            self.over = True
            self.events.note(who, number, said)
        self.thread.work.put(task)

    def end(self):
        """Wait until that has returned."""
        self.events.must(lambda: self.over, *self.current, "never returns")
        if self.raised:
            raise self.raised

    def make(self):
        def make():
            self.made = self.learner(self.reader, self.depth)
            return "returns"
        self.begin("make", 0, make)
        self.end()
        self.events.settle()

    def begin_to_ask(self):
        def ask(number=self.asked):
            if self.iterator is None:
                self.iterator = iter(self.made)
            self.batch = None
            self.batch = next(self.iterator)
            return self.reader.told(self.batch, number)
        self.begin("ask", self.asked, ask)
        self.asked += 1

    def ask(self):
        self.begin_to_ask()
        self.end()

    def close(self):
        (self.made if self.iterator is None else self.iterator).close()
        return "returns"

    def drop(self):
        self.batch = self.iterator = self.made = None
        return "returns"

    def leave(self):
        """The answer's threads should be gone."""
        if not self.events.settle(lambda: answers_threads() <= self.before, LATE):
            self.events.note("threads", answers_threads() - self.before, "left")
            raise Stuck
        self.events.settle()


# ---------------------------------------------------------------- what is tried

def steps(loop, inputs):
    """Each step works until as much is read ahead as may be, and its batch comes while a later read still goes on."""
    reader, count, depth = loop.reader, len(inputs["batches"]), loop.depth
    reader.let_go(1)
    loop.make()
    for step in range(count + 1):
        loop.ask()
        little = "step", step, "has too little read ahead"
        loop.events.must(lambda: reader.begun > min(reader.free, count), *little)
        reader.let_go(step + 1 + depth)
        loop.events.must(lambda: reader.done(min(reader.free, count + 1)), *little)
        loop.events.settle()
        if reader.begun > step + 1 + depth:
            reader.let_go()
            loop.events.settle()        # how many it would read
            raise Stuck
        loop.events.note("step", step, f"ends, {reader.alive(step)} alive")
    loop.leave()
    loop.ask()
    loop.ask()


def waits(loop, inputs):
    """Steps are faster than reads: each batch is asked for while it is being read. The last read may fail."""
    loop.make()
    for number in range(loop.reader.last + 1):
        loop.begin_to_ask()
        loop.events.settle(lambda: loop.over, A_WHILE if number == inputs.get("long") else SOON)
        loop.reader.let_go(loop.asked)
        loop.end()
    loop.leave()
    loop.ask()


def fails(loop, inputs):
    """A read fails while an earlier step works."""
    loop.reader.let_go()
    loop.make()
    for _ in range(loop.reader.last + 1):
        loop.ask()
        loop.events.settle()
    loop.leave()
    loop.ask()
    loop.events.settle()


def left(loop, inputs):
    """The loop is left after so many batches, and where `held` while a read goes on."""
    loop.reader.let_go(inputs["asks"] if inputs["held"] else math.inf)
    loop.make()
    for _ in range(inputs["asks"]):
        loop.ask()
        loop.events.settle()
    loop.begin(inputs["how"], 0, {"close": loop.close, "break": loop.drop}[inputs["how"]])
    if inputs["held"]:
        loop.events.settle(lambda: loop.over, WAITS)
        if inputs["how"] == "close":
            loop.events.settle(lambda: loop.over, A_WHILE)
        loop.reader.let_go()
    loop.end()
    loop.leave()
    if inputs["how"] == "close":
        loop.ask()
        loop.begin("close", 1, loop.close)
        loop.end()


def two(loop, inputs):
    """Two of them; a read of the other one goes on until this one has come to its end."""
    other = Loop(loop.learner, inputs["batches"][::-1], loop.depth, free=1)
    loop.reader.let_go()
    try:
        for one in (other, loop):
            one.make()
        other.ask()
        for _ in range(len(inputs["batches"]) + 1):
            loop.ask()
        other.reader.let_go()
        for _ in range(len(inputs["batches"])):
            other.ask()
        other.leave()
    finally:
        other.reader.let_go()
        loop.events += [[f"other {who}", number, what] for who, number, what in other.events]


WAYS = {way.__name__: way for way in (steps, waits, fails, left, two)}
stuck = threading.Event()       # in an earlier case: the others would only take their time


def ahead(learner, inputs, run):
    """{"events": what happened}, in a run by the clock also "spans"."""
    threading.excepthook = sys.unraisablehook = say_it
    if inputs.get("first"):
        stuck.clear()
    if stuck.is_set():
        return {"events": []}
    if inputs["what"] == "clocks":
        return {"events": [], **clocks(learner, inputs)}
    raised = dict(zip(inputs["fails"], (getattr(builtins, name)("the disk is gone") for name in inputs["raised"]),
                      strict=True))
    loop = Loop(learner, inputs["batches"], inputs["depth"], fails=raised)
    try:
        WAYS[inputs["what"]](loop, inputs)
    except Stuck:
        stuck.set()
    finally:
        loop.reader.let_go()
    return {"events": [list(event) for event in loop.events]}


def say_it(died):
    """Of a thread that an exception has ended, or of one that nobody could hear. (The usual hooks read the stack's
    lines from this file, which an answer may not touch.)"""
    print(f"nobody hears of {died.exc_type.__name__}: {died.exc_value}")


def clocks(learner, inputs):
    """A run by the clock, over a generator: {"spans": [who, begin, end] of each read and step, in seconds}."""
    spans, start = [], time.perf_counter()

    def busy(who, seconds):
        begin = time.perf_counter() - start
        time.sleep(seconds)
        spans.append([who, begin, time.perf_counter() - start])

    def batches():
        for number, seconds in enumerate(inputs["reads"]):
            busy("read", seconds)
            yield number
    try:
        for number in learner(batches(), inputs["depth"]):
            busy("step", inputs["steps"][number])
    except Exception as error:
        return {"spans": spans, "raised": f"{type(error).__name__}: {error}"}
    return {"spans": spans}
