"""Two functions of one rank in turns: while one waits for a message, the other has something to do.

    rank 0, a forward     attention ─ all-to-all ┄┄┄┄┄┄┄┄┄ experts ─ all-to-all ┄┄┄┄┄┄┄┄ …
            a backward                           ─ experts ─ all-to-all ┄┄┄┄┄┄┄┄ attention ─ …

    in_turns(forward, backward)     # each calls pause() where it has posted something that it will wait for

One of them runs at a time, until it pauses or ends; then the other goes on. So which messages follow each other depends
on no timing, and is the same on all ranks that do the same. What pauses are the all-to-alls of collectives.py, those
between experts above all: they are posted, and waited for when it is their turn again. (A long message that neither the
hardware moves, nor a thread of MPI's, moves only while somebody waits.)

Python can suspend a function in the middle of its calls by a thread alone: the second function has one, with this
thread's modes, GPU and stream, random numbers and context variables (np.errstate is one). MPI must allow calls by
several threads one at a time; mpi4py asks for more.
"""

import threading
from contextvars import copy_context

from ..autodiff.primitive import state
from ..backend import on_as_here, random_state
from ..comm.state import state as rank


class _Here(threading.local):
    """What this thread has a part in."""

    turns = None        # (Turns, which of its two functions)


_here = _Here()


class Ended(BaseException):
    """Raised in pause(): the other function has raised, and there is nothing to go on for."""


class Turns:
    """Whose turn it is."""

    def __init__(self):
        self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.through, self.error = [False, False], None

    def switch(self, me):
        """The other one's turn, until it pauses or ends."""
        if not self.through[1 - me]:
            self.go[1 - me].release()
            self.go[me].acquire()
            rank.turn = threading.get_ident()       # where the guard finds this rank computing
        if self.error is not None:      # Ctrl-C raises in the first while it waits for the second
            raise Ended

    def run(self, me, work):
        """One of the two, from its first turn to its end."""
        outer, _here.turns = _here.turns, (self, me)
        rank.turn = threading.get_ident()
        try:
            work()
        except BaseException as error:
            self.error = error if self.error is None else self.error
        finally:
            _here.turns, self.through[me] = outer, True
            self.go[1 - me].release()


def taking_turns():
    """Whether this is called by one of two functions that run in turns."""
    return _here.turns is not None


def pause():
    """The other one's turn."""
    turns, me = _here.turns
    turns.switch(me)


def in_turns(first, second, device="cpu"):
    """Call both, beginning with the first. What one of them raises ends the other at its next pause, and is raised.
    device: where the ops of both run."""
    turns, modes, random, context = Turns(), dict(vars(state)), dict(vars(random_state)), copy_context()
    outer, place = rank.turn, on_as_here(device)

    def as_here():
        vars(state).update(modes)
        vars(random_state).update(random)
        with place:
            second()

    def other():
        turns.go[1].acquire()
        turns.run(1, lambda: context.run(as_here))
    thread = threading.Thread(target=other, name="the other one's turn", daemon=True)
    thread.start()
    turns.run(0, first)
    thread.join()
    rank.turn = outer
    error, turns.error = turns.error, None
    try:
        if error is not None:
            raise error
    finally:
        del error       # nothing here holds what is raised, as where a function raises itself (comm/exits.py looks)
