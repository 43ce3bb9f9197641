"""The guard: a rank that fails ends the whole job, and says why. No rank waits for one that will never come.

What a plain `mpirun python` does when one rank fails is wait for ever, or end with status 0. Here:

    the rank                              what the guard does
    raises, in any thread                 prints the traceback, ends the job
    ends by SystemExit(3), sys.exit(3)    prints where, ends the job with status 3 (status 0: see "leaves"); where all
                                          ranks end by the same one at one time, nothing is said
    calls os._exit                        prints where, ends the job, with a status other than 0
    leaves in the usual way               waits at the exit until all have left; a rank that waits for one that has
                                          left, and hasn't come to that call, prints its own place and ends the job
    is interrupted from the keyboard      ends the job quietly with status 130, also from inside a call of MPI
    is killed by a signal                 (the launcher ends the job; a rank that notices first says whom it misses)
    waits too long                        all ranks print where they are, and the job ends
    waits for one that waits for it,      the same, after some seconds; also where there are more of them, in a circle
    in another call                       (comm/circle.py)

How long is too long: MINITORCH_STALL_SECONDS, 600 unless set, 0 for ever. Every message is one write to stderr, each
line prefixed by `[rank R of N]`. What a rank must know of the others stands in memory shared by the node's ranks; to
those of other nodes it sends a word when it leaves. docs/faults.md shows all of it.

The guard begins when minitorch_dist.comm is imported. Before comm.world() a rank has no way to end the others, who may
be waiting for it in MPI_Init: one that fails says why, comes to comm.world() itself, and then ends the job. One that
leaves, or doesn't come, leaves the others in MPI_Init, until the stall limit (comm/joining.py).
"""

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback

import numpy as np

from . import circle, mpi
from .exits import raise_exit, when_main_ends
from .joining import limited, readable, remove_segment_names
from .memory import map_together
from .mismatch import MismatchError
from .state import state
from .where import outside, stack

LOOK_EVERY = 0.1      # seconds between two looks of the watchdog
GRACE = 0.5           # seconds that a call may still take after its peer has left: the data may be on its way
SPEAK_SECONDS = 1     # for all ranks to say what they have to say, before the job ends
ABORT_LIMIT = 5       # seconds for MPI_Abort, then the process ends itself by SIGALRM
STALL_SECONDS = 600   # unless the environment says something else
CIRCLE_SECONDS = 5    # that a rank waits before it asks whether those that it waits for wait for it
JOIN_SECONDS = 5      # for the others to come to comm.world(), at least: a program takes its time to start

# Words of a rank's line, which only it writes: it has left; its process and the table of processes that it stands in;
# it has found out that it waits in vain, and how; it has said its part. What it waits for follows (comm/circle.py).
GONE, PROCESS, TABLE, STALLED, SPOKEN = range(5)
LINE_BYTES = 128
LIMIT, CIRCLE = 1, 2   # how: it has waited too long, or in a circle
DEADLOCK = ("ranks wait for each other in a circle (what they call, send and receive must come in orders that fit, in "
            "all communicators together)")
LEFT = 1              # the tag of the word, of no bytes, that a rank has left
WORD = np.empty(0, np.uint8)


def stall_seconds():
    """The stall limit that the environment sets; None for no limit."""
    text = os.environ.get("MINITORCH_STALL_SECONDS", str(STALL_SECONDS))
    try:
        seconds = float(text)
        if seconds >= 0:
            return seconds or None
    except ValueError:
        pass
    raise ValueError(f"MINITORCH_STALL_SECONDS={text!r} must be a number of seconds, at least 0 (wait for ever)")


class Guard:
    """Hooks into every way in which a Python process ends.

    engine         the world's, from start() on
    exits          another one of all ranks, on which they say that they leave, or are about to end by a status
    elsewhere      world ranks that can't see this one's line; left: those whose word has come
    lines, mine    {world rank: its words} of this node's ranks, and this rank's own; none where they share no memory
    waits          who of the node waits for whom; None where they share no memory
    limit          seconds that a wait may take; None: no limit
    pid            of the process that is the rank: one that it has forked isn't guarded
    wakeup         a file that becomes readable when a signal has come
    exit_ends_job  (status, message) of the exit by which the program seems to end; None: not by one that ends the job
    seen_missing   {rank: when a call that doesn't wait has first missed it}; next_look: when to look again
    end_process    os._exit, as it was before the guard's own
    has_begun, ending   whether the hooks are set; whether this rank joins the others only to end the job
    watched        the stderr whose flush tells that the main program has ended
    """

    def __init__(self, rank, size, join):
        """join(): comm.world, which makes the engine and calls start(engine)."""
        self.rank, self.size, self.join = rank, size, join
        self.engine, self.exits, self.lines, self.mine, self.wakeup = None, None, {}, None, None
        self.pid, self.exit_ends_job, self.limit = os.getpid(), None, None
        self.next_look, self.seen_missing, self.waits = 0.0, {}, None
        self.elsewhere, self.left, self.hearing = frozenset(), set(), threading.Lock()
        self.end_process, self.has_begun, self.ending, self.watched = os._exit, False, False, None

    def begin(self):
        """Watch the ways to end from now on."""
        self.take_hooks()
        if not self.has_begun:
            atexit.register(self.at_exit)
        self.has_begun = True

    def take_hooks(self):
        """Again at comm.world(): a program may have set its own since the import."""
        sys.excepthook = self.on_exception
        os._exit, sys.exit = self.on_end_process, self.on_exit
        if self.watched is not sys.stderr:
            self.watched = sys.stderr
            when_main_ends(self.on_main_end)

    def joining(self):
        """Around MPI_Init and start(): a context manager that limits the wait for the others."""
        if self.ending:     # why has been said
            return limited(ABORT_LIMIT, None, self.end_process)
        self.limit = stall_seconds()
        limit = self.limit and max(self.limit, JOIN_SECONDS)
        return limited(limit, lambda: self.say(
            f"has waited {limit:g} s (MINITORCH_STALL_SECONDS) for all ranks to call comm.world(), and the job ends: "
            "another rank has left, computes for so long, or never calls it. This rank waits here:"), self.end_process)

    def start(self, engine):
        """Guard this process as a rank of the engine's communicator, the world. Collective."""
        self.rank, self.size, self.pid = engine.rank, engine.size, os.getpid()
        self.begin()      # a launcher may have told its processes nothing
        node = engine.of_node()
        lines = map_together(node, LINE_BYTES + circle.line_bytes(node.size)) or []
        self.lines = {rank: line.cast("Q") for rank, line in zip(node.world_ranks, lines, strict=False)}
        if self.lines:
            self.waits = circle.Waits(self.rank, {rank: line[LINE_BYTES // 8:] for rank, line in self.lines.items()})
            self.mine = self.lines[self.rank]
            self.mine[PROCESS], self.mine[TABLE] = self.pid, _process_table()
        self.meet_everybody(engine)
        self.exits = engine.split(0, engine.rank)
        self.elsewhere = frozenset(range(self.size)) - {self.rank, *self.lines}
        self.engine, state.look = engine, self.look
        remove_segment_names()
        threading.excepthook = self.on_thread_exception
        with contextlib.suppress(Exception):   # a stderr without a file
            if not faulthandler.is_enabled():
                faulthandler.enable()          # a segmentation fault shows its line
        if threading.current_thread() is threading.main_thread():
            self.wakeup, signalled = os.pipe()
            os.set_blocking(signalled, False)
            signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        if not self.ending:     # at its exit Python 3.12 starts no thread
            threading.Thread(target=self.watch, name="minitorch-guard", daemon=True).start()

    def meet_everybody(self, engine):
        """A message between every two ranks: then MPI has mapped all the shared memory that it will."""
        engine.all_to_all(np.zeros(self.size, np.uint8), np.zeros(self.size, np.uint8),
                          [1] * self.size, [1] * self.size)
        engine.barrier()

    def joined(self):
        """Whether this rank has joined the others; it does so now if it hasn't yet, to end the job with them.

        Not in a program that has come to mpi4py by itself: its other ranks are in MPI_Init no more, and elsewhere.
        """
        if self.engine is None and not mpi.is_loaded():
            self.ending = True
            with contextlib.suppress(Exception):
                self.join()
        return self.engine is not None

    def is_rank(self):
        """False in a process forked by a rank, which ends as it likes."""
        return os.getpid() == self.pid

    def say(self, message):
        """Print the message with this rank's prefix, in one write."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        prefix = f"[rank {self.rank} of {self.size}] "
        text = "".join(prefix + line + "\n" for line in message.rstrip().splitlines())
        with contextlib.suppress(OSError):
            if sys.__stderr__ is not None:      # else 2 is closed, or another file
                os.write(2, text.encode(errors="replace"))

    def end_job(self, status, message):
        """Print the message and end all ranks."""
        if self.engine is not None:
            signal.alarm(ABORT_LIMIT)
        self.say(message)
        self.joined()
        signal.alarm(ABORT_LIMIT)
        remove_segment_names()
        mpi.abort(status)
        self.end_process(status)

    def say_and_hear(self, message):
        """Print the message, and give the others a moment to print theirs: whoever ends the job ends it for all."""
        self.say(message)
        if self.lines:
            self.mine[SPOKEN] = 1
        limit = time.monotonic() + SPEAK_SECONDS
        while not self.all_lines(SPOKEN, GONE) and time.monotonic() < limit:
            time.sleep(0.01)

    def all_lines(self, *words):
        """True if every rank's line is here, with one of the words set."""
        return len(self.lines) == self.size and all(any(line[word] for word in words) for line in self.lines.values())

    # ------------------------------------------------------------ ways to end

    def on_exception(self, kind, error, trace):
        if not self.is_rank():
            sys.__excepthook__(kind, error, trace)
            return
        if issubclass(kind, KeyboardInterrupt):
            self.end_job(130, "")
        elif issubclass(kind, MismatchError):   # all ranks raise it
            frames = outside(traceback.extract_tb(trace))
            self.say_and_hear("".join(["Traceback (most recent call last):\n", *traceback.format_list(frames),
                                       *traceback.format_exception_only(kind, error)]))
            self.end_job(1, "")
        else:
            self.end_job(1, "".join(traceback.format_exception(kind, error, trace)))

    def on_thread_exception(self, args):
        if args.exc_type is not SystemExit:
            self.on_exception(args.exc_type, args.exc_value, args.exc_traceback)

    def on_end_process(self, status):
        if self.is_rank():
            self.end_job(status or 1, f"os._exit({status}) was called:\n" + stack(sys._getframe(1)))
        self.end_process(status)

    def on_exit(self, status=None):
        """sys.exit: nothing happens yet, for the exception may be caught; on_main_end and at_exit look."""
        if status not in (None, 0) and threading.current_thread() is threading.main_thread() and self.is_rank():
            self.exit_ends_job = status, f"sys.exit({status!r}) was called:\n" + stack(sys._getframe(1))
        raise_exit(status)

    def on_main_end(self, error, where):
        """The main program has ended, by SystemExit or (None) without."""
        if error is None or error.code in (None, 0):
            self.exit_ends_job = None
        elif self.exit_ends_job is None or self.exit_ends_job[0] != error.code:
            why = error.__cause__ and "".join(traceback.format_exception_only(error.__cause__))
            self.exit_ends_job = error.code, f"SystemExit({error.code!r}) was raised:\n{where}{why or ''}"

    def at_exit(self):
        """Runs at the end of the program, before MPI is finalised."""
        if not self.is_rank():
            return
        if self.exit_ends_job and (self.joined() or mpi.is_running()):
            code, message = self.exit_ends_job
            status = code & 0xFF if isinstance(code, int) else 1     # of larger numbers a process ends with 8 bits
            if not status or not self.all_end_by(status):
                self.end_job(status or 1, message)
        elif self.shown_by_another_hook():
            self.end_job(1, "ends by this exception, which a sys.excepthook of the program has seen:\n" +
                         "".join(traceback.format_exception_only(sys.last_value)))
        if self.engine is not None:
            self.leave()
        mpi.outlive_python(GRACE)

    def leave(self):
        """Say so, and wait until all have left: MPI_Finalize would, too, but not with a word to those who wait."""
        if self.lines:
            self.mine[GONE] = 1
        if not mpi.is_running():        # the program has finalised it
            return
        words = [self.exits.send(WORD, rank, LEFT, async_op=True) for rank in self.elsewhere]
        while not all(line[GONE] for line in self.lines.values()) or not self.elsewhere <= self.left:
            self.hear()
            self.engine.make_progress()
            time.sleep(0.002)
        for word in words:
            word.wait()
        with self.hearing:      # MPI is finalised soon, and the watchdog's thread goes on
            self.elsewhere = frozenset()

    def hear(self):
        """Note which ranks of other nodes have left. From any thread, but while MPI waits only if it allows that."""
        with self.hearing:
            while not self.elsewhere <= self.left and (word := self.exits.probe(LEFT)) is not None:
                self.exits.recv(WORD, word[0], LEFT)
                self.left.add(word[0])

    def shown_by_another_hook(self):
        """Whether the program has ended by an exception, of which on_exception wasn't told."""
        return sys.excepthook != self.on_exception and isinstance(getattr(sys, "last_value", None), Exception)

    def all_end_by(self, status):
        """Whether all ranks are about to end with this status, as after a command line that no rank can run."""
        if self.exits is None:      # the program has come to mpi4py by itself
            return False
        found = np.empty(self.size, np.uint8)
        told = self.exits.all_gather(found, np.array([status], np.uint8), async_op=True)
        return told.wait(GRACE) and bool((found == status).all())

    # ------------------------------------------------------------ waiting

    def watch(self):
        """The watchdog's thread. No MPI call here, except the abort, and to hear of other nodes."""
        calls, since = 0, time.monotonic()
        while not self.lines or not self.mine[GONE]:
            self.sleep_unless_interrupted()
            if state.calls != calls or state.call is None:
                calls, since = state.calls, time.monotonic()
            waited = time.monotonic() - since
            stalled = LIMIT if self.limit is not None and waited > self.limit else 0
            if self.waits is not None and self.waits_in_a_circle(waited, calls):
                stalled = CIRCLE
            if waited > GRACE and state.call is not None and self.elsewhere and mpi.allows_threads():
                self.hear()
            if stalled or self.others_stalled():
                self.stall(stalled)
            if self.missing(state.call):
                time.sleep(GRACE)
                call = state.call
                if state.calls == calls and (missing := self.missing(call)):
                    self.end_job(1, self.describe(call, missing))

    def sleep_unless_interrupted(self):
        """Wait for the next look. After Ctrl-C a rank inside a call of MPI can't raise KeyboardInterrupt."""
        if self.wakeup is None:
            time.sleep(LOOK_EVERY)
        elif readable(self.wakeup, LOOK_EVERY):
            interrupted = signal.SIGINT in os.read(self.wakeup, 100)
            calls = state.calls
            time.sleep(GRACE)
            if (interrupted and state.call is not None and state.calls == calls
                    and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
                self.end_job(130, "")

    def missing(self, call):
        """{rank: what has become of it}, of those that the call waits for and that won't come."""
        found = {}
        for rank in () if call is None else call.waits_for():
            line = self.lines.get(rank)
            if not state.met and (rank in self.left or line is not None and line[GONE]):
                found[rank] = "has left the program"
            elif line is not None and line[TABLE] == self.mine[TABLE] and _is_dead(line[PROCESS]):
                found[rank] = "has died without a word: killed by a signal?"
        return found

    def look(self, call):
        """RuntimeError where a call that doesn't wait, but will come again, looks for ranks that won't come."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + LOOK_EVERY
        self.hear()
        missing = self.missing(call)
        if any(now - self.seen_missing.setdefault(rank, now) > GRACE for rank in missing):
            raise RuntimeError(f"this rank looks in {call} for " + told(missing))

    def describe(self, call, missing=None):
        """Where this rank is, and for whom it waits."""
        if call is None:
            frame = sys._current_frames().get(state.turn or threading.main_thread().ident)
            return f"is in no call of a communicator. It is here:\n{stack(frame)}"
        whom = f" for {told(missing)}" if missing else ""
        return f"waits in {call}{whom}. It waits here:\n{stack(sys._current_frames().get(state.thread))}"

    def waits_in_a_circle(self, waited, calls):
        """Whether it is certain; not at the first look."""
        call = state.call
        if waited > CIRCLE_SECONDS and call is not None:
            return bool(self.waits.circle(calls, call))
        self.waits.forget()
        return False

    def others_stalled(self):
        return any(line[STALLED] for line in self.lines.values()) and not self.mine[SPOKEN]

    def stall(self, stalled):
        """Somebody has waited in vain: say where this rank is; the one who has waited ends the job. stalled: how this
        one has, or 0."""
        how, awaited = stalled or max(line[STALLED] for line in self.lines.values()), None
        if how == CIRCLE:
            why, awaited = DEADLOCK, self.waits.awaited(self.rank)
        else:
            why = f"the stall limit of {self.limit:g} s (MINITORCH_STALL_SECONDS) is reached"
        message = f"{why}, and the job ends. This rank {self.describe(state.call, awaited)}"
        if not stalled:
            self.say(message)
            self.mine[SPOKEN] = 1
            return
        if self.lines:
            self.mine[STALLED] = stalled
        self.say_and_hear(message)
        left = sorted(self.left.union(rank for rank, line in self.lines.items() if line[GONE]))
        self.end_job(1, f"these ranks have left the program: {left}" if left else "")


def told(missing):
    """Who is missing, in words."""
    return ", and for ".join(f"rank {rank}, which {what}" for rank, what in missing.items())


def _process_table():
    """A number of the namespace that process numbers are from; 0 where that can't be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _is_dead(pid):
    """No such process, or one that has ended and that its parent hasn't asked about yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return os.path.exists("/proc/self/stat")
    except OSError:
        return False
