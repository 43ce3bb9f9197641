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
take turns anyway, is called by one thread. The names are those of torch.distributed.rpc; but there is no global agent
(an Rpc is one), and objects that an RRef names live until shutdown().
"""

import io
import itertools
import pickle
import time
import traceback

import numpy as np

from .. import comm as communication
from ..comm import check

APART = 4096        # bytes from which on an array travels as it is, beside the pickled rest


class Future:
    """What a call will give. `wait()` returns it, or raises what the call has raised.

    A function that is called from elsewhere may return a Future, too: the answer is sent when somebody there has called
    its set_result or set_exception (torch's async_execution).
    """

    def __init__(self, rpc=None, owner=None):
        self._rpc, self._owner, self._then = rpc, owner, []
        self._done = self._looked_at = False
        self._value = self._error = None

    def is_completed(self):
        """Whether the answer is there. Never waits; serves the calls that have come."""
        if not self._done and self._rpc is not None:
            self._rpc.serve()
        return self._done

    def wait(self, timeout=None):
        """The value; serves calls of others until it is there. TimeoutError after `timeout` seconds (None: no limit).
        """
        if not self._done and self._rpc is None:
            raise RuntimeError("this Future is of no call: who has made it calls set_result, or set_exception")
        if not self._done and not self._rpc.serve_until(lambda: self._done, timeout):
            raise TimeoutError(f"rank {self._owner} hasn't answered within {timeout} s: it computes, or waits for "
                               "another rank; it answers when it waits for an answer itself, in serve() and shutdown()")
        self._looked_at = True
        if self._error is not None:
            raise self._error
        return self._value

    def set_result(self, value):
        """The call is done, and this is what it gives."""
        self._finish(value, None)

    def set_exception(self, error):
        """The call is done, and raises this."""
        self._finish(None, error)

    def add_done_callback(self, function):
        """function(future) when it is done; at once if it is."""
        if self._done:
            function(self)
        else:
            self._then.append(function)

    def _finish(self, value, error):
        if self._done:
            raise RuntimeError("a Future is set twice")
        self._done, self._value, self._error = True, value, error
        then, self._then = self._then, ()
        for function in then:
            function(self)


class RRef:
    """The name of an object that rank `owner` keeps. It can be an argument or a result of calls: the name travels."""

    def __init__(self, rpc, owner, key, made=None):
        self._rpc, self.owner, self.key, self._made = rpc, owner, key, made

    def __repr__(self):
        return f"RRef({self.key!r} of rank {self.owner})"

    def __reduce__(self):
        raise TypeError(f"{self!r} can only be pickled by the Rpc that it belongs to: pass it as an argument of a call")

    def is_owner(self):
        """Whether the object is here."""
        return self.owner == self._rpc.rank

    def local_value(self):
        """The object itself, on its owner."""
        if not self.is_owner():
            raise RuntimeError(f"{self!r}: local_value() on rank {self._rpc.rank}, which isn't its owner; to_here() "
                               "copies it, rpc_sync() calls its methods there")
        return self._rpc.object(self.key)

    def to_here(self):
        """A copy of the object."""
        return self._rpc.rpc_sync(self.owner, itself, (self,))

    def rpc_sync(self):
        """ref.rpc_sync().method(*args, **kwargs): what the object's method gives there."""
        return Methods(self, self._rpc.rpc_sync)

    def rpc_async(self):
        """ref.rpc_async().method(*args, **kwargs): a Future of it."""
        return Methods(self, self._rpc.rpc_async)


class Methods:
    """The methods of the object that an RRef names."""

    def __init__(self, ref, call):
        self._ref, self._call = ref, call

    def __getattr__(self, name):
        return lambda *args, **kwargs: self._call(self._ref.owner, method, (self._ref, name, args, kwargs))


def itself(ref):
    """What the owner does for to_here()."""
    return ref.local_value()


def method(ref, name, args, kwargs):
    """What the owner does for a call of a method."""
    return getattr(ref.local_value(), name)(*args, **kwargs)


class Rpc:
    """Calls between the ranks of a Communicator (default: the world's). Collective.

    Functions travel by name, as pickle has it: they are top-level functions of a module that the other rank can import
    (or of the program itself), not lambdas. Arguments and results are copies, on a call to the own rank as well.
    Contiguous NumPy arrays from 4 KiB on travel as buffers, unpickled and uncopied: those of rpc_async's arguments
    may not be written until it has been waited for. (Arrays on GPUs pickle themselves, through the host.) What a
    function raises is raised at the caller, with the other rank's traceback in a note.

    Messages go by a communicator of its own, `comm`, under whose name the ledger counts: "send" the buffers, "envelope"
    all else. An Rpc serves its own calls only, not those of another one. A rank that leaves the program without
    shutdown(), or dies, ends the job: those that wait for an answer or a call say so (comm/guard.py). A process alone
    calls itself.
    """

    def __init__(self, comm=None, name="rpc"):
        comm = comm if comm is not None else communication.world()
        self.comm = comm.split(0, name=name)
        self.rank, self.size = self.comm.rank, self.comm.size
        self._numbers = itertools.count()
        self._asked = {}        # number -> Future of a call that hasn't been answered
        self._failed = []       # Futures of those that were answered by an exception
        self._objects = {}      # key -> what RRefs to this rank name
        self._sending = []      # Works
        self._come = 0          # on rank 0: ranks that have come to shutdown
        self.is_over = False

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind is None:        # a rank that fails ends the job instead
            self.shutdown()

    # ------------------------------------------------------------ calls

    def rpc_sync(self, to, function, args=(), kwargs=None):
        """function(*args, **kwargs), run by rank `to`."""
        return self.rpc_async(to, function, args, kwargs).wait()

    def rpc_async(self, to, function, args=(), kwargs=None):
        """A Future of function(*args, **kwargs), run by rank `to`."""
        return self._call(to, None, function, args, kwargs)

    def remote(self, to, function, args=(), kwargs=None):
        """An RRef of function(*args, **kwargs), which rank `to` runs (a class, for instance) and keeps. Returns at
        once; where the function raises, what uses the RRef does."""
        key = self.rank, next(self._numbers)
        return RRef(self, to, key, self._call(to, key, function, args, kwargs))

    def _call(self, to, key, function, args, kwargs):
        """key: under which rank `to` shall keep what comes out, instead of answering with it."""
        check.rank("rpc", "to", to, self.size)
        if self.is_over:
            raise RuntimeError(f"rpc to rank {to} after shutdown(): nobody serves any more")
        try:
            packed = self._dumps((key, function, tuple(args), kwargs or {}))
        except Exception as error:
            if "pickle" not in str(error):
                raise
            raise TypeError(f"rpc to rank {to}: {error}. Functions travel by name, and must stand at the top of a "
                            "module; arguments are pickled") from error
        number = next(self._numbers)
        future = self._asked[number] = Future(self, to)
        self._send(to, "call", number, packed)
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
        while (message := self.comm.recv_any(timeout=0)) is not None:
            self._handle(*message)
            count += 1
        return count

    def serve_until(self, done, timeout=None):
        """Serve until done() holds; False after `timeout` seconds (None: no limit)."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not done():
            message = self.comm.recv_any(None if limit is None else max(0.0, limit - time.monotonic()))
            if message is not None:
                self._handle(*message)
            elif time.monotonic() >= limit:
                return done()
        return True

    def shutdown(self):
        """Serve the others until all ranks have come here and every call is answered. Collective. Raises the first
        exception of a call of this rank that nobody has waited for."""
        self.serve_until(lambda: not self._asked)
        self._send(0, "come")
        self.serve_until(lambda: self.is_over)
        for work in self._sending:
            work.wait()
        self._sending.clear()
        self._objects.clear()
        for future in self._failed:
            if not future._looked_at:
                raise future._error

    def _handle(self, src, parts):
        kind, number, body = pickle.loads(parts[0])
        if kind == "call":
            self._run(src, number, body, parts[1:])
        elif kind == "answer":
            self._answered(self._asked.pop(number), *self._loads(body, parts[1:]))
        elif kind == "come":
            self._come += 1
            if self._come == self.size:
                for rank in range(self.size):
                    self._send(rank, "over")
        else:
            self.is_over = True

    def _run(self, src, number, body, buffers):
        future = Future()
        try:
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
        future.add_done_callback(lambda future: self._answer(src, number, future))

    def _answer(self, src, number, future):
        error, packed = future._error, None
        if error is None:
            try:
                packed = self._dumps((future._value, None, None))
            except Exception as unsent:
                error = unsent
        if error is not None:
            text = f"It was raised on rank {self.rank}:\n" + "".join(traceback.format_exception(error))
            packed = self._dumps((None, portable(error), text))
        self._send(src, "answer", number, packed, copied=True)

    def _answered(self, future, value, error, text):
        if error is None:
            future.set_result(value)
        else:
            error.add_note(text)
            self._failed.append(future)
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
        Pickler(file, protocol=5, buffer_callback=travels_inside).dump(value)
        return file.getvalue(), buffers

    def _loads(self, body, buffers):
        return Unpickler(self, body, buffers).load()


def portable(error):
    """An exception that can be unpickled elsewhere: itself, or a RuntimeError that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Pickler(pickle.Pickler):
    """Of an RRef, its name."""

    def persistent_id(self, obj):
        if not isinstance(obj, RRef):
            return None
        if obj._made is not None:       # the object must be there before its name goes on
            obj._made.wait()
        return obj.owner, obj.key


class Unpickler(pickle.Unpickler):
    """Of a name, an RRef of this rank's Rpc."""

    def __init__(self, rpc, body, buffers):
        super().__init__(io.BytesIO(body), buffers=buffers)
        self.rpc = rpc

    def persistent_load(self, name):
        return RRef(self.rpc, *name)
