"""Remote procedure calls: a rank has another one run a function, or keep an object, and gets what comes out.

    rpc = Rpc(world)                                                # on all ranks
    if world.rank == 0:
        rpc.rpc_sync(1, np.add, (x, y))                             # x + y, worked out by rank 1
        future = rpc.rpc_async(2, np.linalg.svd, (x,))              # at once; future.wait() is what comes out
        table = rpc.remote(1, dict, ({"a": 1},))                    # an RRef: the dict stays with rank 1
        table.rpc_sync().get("a"), table.to_here()                  # 1, and a copy of the dict
    rpc.shutdown()                                                  # on all ranks: serves the others' calls

There are no threads. A rank serves calls whenever it waits for an answer (so two ranks that call each other don't wait
for ever), in shutdown(), and in serve(), which a rank that computes for long may call now and then:

    rank 0   rpc_sync(1, f) . . . serves g . . . . . . . . . . f's result
    rank 1   rpc_sync(0, g) . . . serves f . . . g's result

So calls run in the order in which they come, one inside another where a call waits itself, and MPI, whose threads would
take turns anyway, is called by one thread. The price: a call that waits goes on only when those that were begun
meanwhile have ended. One that waits for what a call below it gives waits for ever; and where 50 run one inside another
the next is refused, a RuntimeError at its caller. The names are those of torch.distributed.rpc; but there is no global
agent (an Rpc is one), and objects that an RRef names live until shutdown().
"""

import io
import itertools
import pickle
import time
import traceback
from contextlib import contextmanager

import numpy as np

from ... import comm as communication
from ...autodiff.primitive import state
from ...backend.streams import random_state
from ...comm import check
from ...divergence import Diverged
from .rref import Future, Pickler, RRef, Unpickler, portable

APART = 4096        # bytes from which on an array travels as it is, beside the pickled rest
DEEPEST = 50        # calls that a rank runs one inside another: each takes 7 of Python's 1,000 frames, and its own


class Rpc:
    """Calls between the ranks of a Communicator (default: the world's). Collective.

    Functions travel by name, as pickle has it: they are top-level functions of a module that the other rank can import
    (or of the program itself), not lambdas. Arguments and results are copies, on a call to the own rank as well.
    Contiguous NumPy arrays from 4 KiB on travel as buffers, unpickled and uncopied: those of rpc_async's arguments
    may not be written until it has been waited for. (Arrays on GPUs pickle themselves, through the host.) What a
    function raises is raised at the caller, with the other rank's traceback in a note. A call runs outside of the modes
    and scopes that its rank happens to wait in (no_grad, autocast, random_scope …).

    Messages go by a communicator of its own, `comm`, under whose name the ledger counts: "send" the buffers, "envelope"
    all else. An Rpc serves its own calls only, not those of another one. A rank that leaves the program without
    shutdown(), or dies, ends the job: those that wait for an answer or a call say so (comm/guard.py). A process alone
    calls itself. An error that leaves a `with` block is raised on the other ranks too, as a RuntimeError; Diverged, of
    which no rank is more to blame than another, as itself.
    """

    def __init__(self, comm=None, name="rpc"):
        comm = comm if comm is not None else communication.world()
        self.comm = comm.split(0, name=name)
        self.rank, self.size = self.comm.rank, self.comm.size
        self._numbers = itertools.count()
        self._asked = {}        # number -> Future of a call that hasn't been answered
        self._failed = {}       # Future: None, of those answered by an exception that nobody has looked at
        self._objects = {}      # key -> what RRefs to this rank name
        self._sending = []      # Works
        self._depth = 0         # calls that run here, one inside another
        self._made = 0          # calls of this rank
        self._come, self._before = [], None     # on rank 0, in shutdown: `_made` of those who have come; the last sum
        self._again = False     # to come once more
        self.is_over = False
        self.broken = None      # (class, words) of the error by which another rank has left without shutdown()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.shutdown()
        else:
            self.abandon(error)

    def abandon(self, error):
        """Leave without shutdown(), because of an error: what waits for calls or answers on the other ranks raises a
        RuntimeError of it, or Diverged. (If nobody catches the error here, it ends the job.) After shutdown() nobody
        waits."""
        if self.is_over:
            return
        told = "".join(traceback.format_exception(error))
        left = ((Diverged, str(error)) if isinstance(error, Diverged) else
                (RuntimeError, f"rank {self.rank} has left {self.comm.name!r} by an error:\n{told}"))
        self.is_over = True
        for to in range(self.size) if self.broken is None else ():
            if to != self.rank:
                self._send(to, "abandon", left)

    # ------------------------------------------------------------ calls

    def rpc_sync(self, to, function, args=(), kwargs=None):
        """function(*args, **kwargs), run by rank `to`."""
        return self.rpc_async(to, function, args, kwargs).wait()

    def rpc_async(self, to, function, args=(), kwargs=None):
        """A Future of function(*args, **kwargs), run by rank `to`."""
        return self._call(to, None, function, args, kwargs)

    def remote(self, to, function, args=(), kwargs=None):
        """An RRef of function(*args, **kwargs), which rank `to` runs (a class, for instance) and keeps. Returns at
        once, with the arguments copied; where the function raises, what uses the RRef does."""
        key = self.rank, next(self._numbers)
        return RRef(self, to, key, self._call(to, key, function, args, kwargs))

    def _call(self, to, key, function, args, kwargs):
        """key: under which rank `to` shall keep what comes out, instead of answering with it."""
        check.rank("rpc", "to", to, self.size)
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"rpc to rank {to}: args is a {type(args).__name__}; pass a tuple: (x,) for one argument")
        self._check_whole()
        if self.is_over:
            raise RuntimeError(f"rpc to rank {to} after shutdown(): nobody serves any more")
        try:
            packed = self._dumps((key, function, tuple(args), kwargs or {}))
        except Exception as error:
            # Python 3.13 says "Can't get local object", where others say "Can't pickle" too.
            if "pickle" not in str(error) and "local object" not in str(error):
                raise
            raise TypeError(f"rpc to rank {to}: {error}. Functions travel by name, and must stand at the top of a "
                            "module; arguments are pickled") from error
        number = next(self._numbers)
        future = self._asked[number] = Future(self, to)
        self._made += 1
        self._send(to, "call", number, packed, copied=key is not None)
        return future

    def register(self, key, value):
        """Keep an object of this rank under a key; its RRef."""
        self._objects[key] = value
        return self.rref(self.rank, key)

    def rref(self, owner, key):
        """The RRef of what rank `owner` has registered under the key, or will have when it serves."""
        check.rank("rref", "owner", owner, self.size)
        return RRef(self, owner, key)

    def object(self, key):
        """What this rank keeps under the key."""
        if key not in self._objects:
            raise LookupError(f"rank {self.rank} keeps nothing under {key!r}; it has "
                              f"{', '.join(map(repr, self._objects)) or 'nothing'}")
        return self._objects[key]

    # ------------------------------------------------------------ serving

    def serve(self):
        """Answer the calls that have come; how many messages there were. Never waits."""
        count = 0
        self._check_whole()
        while not self.is_over and (message := self.comm.recv_any(timeout=0)) is not None:
            self._handle(*message)
            count += 1
        return count

    def _check_whole(self):
        if self.broken is not None:
            kind, words = self.broken
            raise kind(words)

    def serve_until(self, done, timeout=None):
        """Serve until done() holds; False after `timeout` seconds (None: no limit). RuntimeError where a rank alone
        would wait for itself."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not done():
            self._check_whole()
            if self.size == 1 and limit is None:        # its calls are answered when they are made
                raise RuntimeError(f"{self.comm.name!r} has this rank alone, which waits for what it must do itself: "
                                   "set the Future that a called function has given, or end the call that this one "
                                   "runs in")
            message = self.comm.recv_any(None if limit is None else max(0.0, limit - time.monotonic()))
            if message is not None:
                self._handle(*message)
            elif time.monotonic() >= limit:
                return done()
        return True

    def shutdown(self):
        """Serve the others until all ranks have come here and every call is answered, those of served functions too.
        Collective. Raises the first exception of a call of this rank that nobody has waited for.

        A rank comes when its own calls are answered, and says how many it has made; while it serves it may make more.
        So rank 0 has all come again, until they have made no more than before: then there was a moment, when the last
        had come and none had come again, at which no call was under way.
        """
        if self.is_over:
            return
        while not self.is_over:
            self.serve_until(lambda: not self._asked)
            self._again = False
            self._send(0, "come", self._made)
            self.serve_until(lambda: self._again or self.is_over)
        for work in self._sending:
            work.wait()
        self._sending.clear()
        self._objects.clear()
        self.comm.free()
        failed, self._failed = self._failed, {}
        if failed:
            raise next(iter(failed))._error

    def _handle(self, src, parts):
        with no_modes():
            match pickle.loads(parts[0]):
                case "call", number, body:
                    self._run(src, number, body, parts[1:])
                case "answer", number, body:
                    self._take(src, self._asked.pop(number), body, parts[1:])
                case "come", made, _:
                    self._count(made)
                case "again", _, _:
                    self._again = True
                case "over", _, _:
                    self.is_over = True
                case "abandon", left, _:
                    self.broken = left

    def _count(self, made):
        self._come.append(made)
        if len(self._come) == self.size:
            before, self._before, self._come = self._before, sum(self._come), []
            for rank in range(self.size):
                self._send(rank, "over" if self._before == before else "again")

    def _run(self, src, number, body, buffers):
        future = Future()
        self._depth += 1
        try:
            if self._depth > DEEPEST:
                raise RuntimeError(f"rank {self.rank} runs {DEEPEST} calls already, one inside another, each of which "
                                   "waits: keep fewer under way at once, or let them not wait for calls of their own")
            key, function, args, kwargs = self._loads(body, buffers)
            value = function(*args, **kwargs)
            if key is not None:
                self._objects[key], value = value, None
            if isinstance(value, Future):
                future = value
            else:
                future.set_result(value)
        except Exception as error:      # KeyboardInterrupt and SystemExit are this rank's own
            future.set_exception(error)
        finally:
            self._depth -= 1
        future.add_done_callback(lambda future: self._answer(src, number, future))

    def _answer(self, src, number, future):
        if self.is_over or self.broken is not None:     # nobody waits
            return
        future._looked_at()
        error, packed = future._error, None
        if error is None:
            try:
                packed = self._dumps((future._value, None, None))
            except Exception as unsent:
                error = unsent
        if error is not None:
            raised = traceback.TracebackException.from_exception(error)
            raised.__notes__ = None     # they travel by themselves; said again at each rank they would double
            text = f"It was raised on rank {self.rank}:\n" + "".join(raised.format())
            packed = self._dumps((None, portable(error), text))
        self._send(src, "answer", number, packed, copied=True)

    def _take(self, src, future, body, buffers):
        try:
            value, error, text = self._loads(body, buffers)
        except Exception as unread:
            value, error, text = None, unread, f"It was raised here, by unpickling what rank {src} has answered"
        if error is None:
            future.set_result(value)
        else:
            error.add_note(text)
            self._failed[future] = None
            future.set_exception(error)

    # ------------------------------------------------------------ messages

    def _send(self, to, kind, number=None, packed=(b"", ()), copied=False):
        """packed: what _dumps gave. copied: its arrays are copied first, for their owner may write to them before they
        have left."""
        body, buffers = packed
        if copied or to == self.rank:
            buffers = [buffer.copy() for buffer in buffers]
        parts = [np.frombuffer(pickle.dumps((kind, number, body)), np.uint8), *buffers]
        if to == self.rank:
            self._handle(to, parts)
            return
        self._sending = [work for work in self._sending if not work.is_completed()]
        self._sending += self.comm.isend_parts(parts, to)

    def _dumps(self, value):
        """(bytes, [arrays of bytes that are not in them])"""
        buffers = []

        def travels_inside(buffer):
            raw = np.frombuffer(buffer.raw(), np.uint8)
            if raw.nbytes < APART:
                return True
            buffers.append(raw)
            return False
        file = io.BytesIO()
        Pickler(self, file, travels_inside).dump(value)
        return file.getvalue(), buffers

    def _loads(self, body, buffers):
        return Unpickler(self, body, buffers).load()


@contextmanager
def no_modes():
    """Inside, no mode of recording is on, and no scope of random numbers: a message may come in anywhere."""
    modes, random = dict(vars(state)), (random_state.scope, random_state.path, random_state.by_sample)
    vars(state).clear()
    random_state.scope, random_state.path, random_state.by_sample = None, (), None
    try:
        yield
    finally:
        vars(state).clear()
        vars(state).update(modes)
        random_state.scope, random_state.path, random_state.by_sample = random
