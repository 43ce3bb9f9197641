"""What remote calls give: a Future of what comes out, or an RRef, the name of an object that another rank keeps; and
how both names and values are pickled."""

import io
import pickle
import sys
import threading

FORGOTTEN = ("the called function has given a Future that nobody has set, nor can set any more: who gives one keeps "
             "it, and calls its set_result or set_exception")


class Future:
    """What a call will give. `wait()` returns it, or raises what the call has raised.

    A function that is called from elsewhere may return a Future, too: the answer is sent when somebody there has called
    its set_result or set_exception (torch's async_execution). Where nobody has it any more, who waits for the answer
    gets a RuntimeError; where it is kept and never set, the job ends at the stall limit.
    """

    def __init__(self, rpc=None, owner=None):
        self._rpc, self._owner, self._then = rpc, owner, []
        self._done = False
        self._value = self._error = None

    def __del__(self):
        # Python collects cycles in any thread, and only the main one may send.
        if self._then and not self._done and self._rpc is None and not sys.is_finalizing() \
                and threading.current_thread() is threading.main_thread():
            self.set_exception(RuntimeError(FORGOTTEN))

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
                               "another rank, or nobody has set the Future that its function gave; it answers when it "
                               "waits for an answer itself, in serve() and shutdown()")
        self._looked_at()
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            self = None     # the error holds this frame, and shall not hold itself by it, with all frames' arrays

    def set_result(self, value):
        """The call is done, and this is what it gives."""
        self._finish(value, None)

    def set_exception(self, error):
        """The call is done, and raises this."""
        self._finish(None, error)

    def add_done_callback(self, function):
        """function(future) when it is done; at once if it is. What it raises then is raised where the answer is set or
        taken, after all the others have run."""
        if self._done:
            function(self)
        else:
            self._then.append(function)

    def _finish(self, value, error):
        if self._done:
            raise RuntimeError("a Future is set twice")
        self._done, self._value, self._error = True, value, error
        then, self._then = self._then, ()
        errors = []
        for function in then:
            try:
                function(self)
            except Exception as failed:
                errors.append(failed)
        if errors:
            raise errors[0]

    def _looked_at(self):
        """An error is somebody's now: shutdown() needn't raise it."""
        if self._rpc is not None:
            self._rpc._failed.pop(self, None)


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
        if self._made is not None:
            self._made.wait()
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


def portable(error):
    """An exception that can be unpickled elsewhere: itself, or a RuntimeError that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Pickler(pickle.Pickler):
    """Of an RRef, its name, which means something within its own Rpc."""

    def __init__(self, rpc, file, keep):
        super().__init__(file, protocol=5, buffer_callback=keep)
        self.rpc = rpc

    def persistent_id(self, obj):
        if not isinstance(obj, RRef):
            return None
        if obj._rpc is not self.rpc:
            raise TypeError(f"{obj!r} belongs to another Rpc ({obj._rpc.comm.name!r}), and can't go through a call of "
                            f"{self.rpc.comm.name!r}")
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
