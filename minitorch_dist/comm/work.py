"""Work: an operation that has been posted and will be waited for.

What runs it hands back a request, with two calls: test(), whether it has finished, never waits; wait(timeout) finishes
it, and is False if that took more than `timeout` seconds (None: no limit). Engines have their own; two are for all.
"""

from .. import ledger
from .mismatch import MismatchError
from .state import Call, state


def timeline_detail(x):
    """What a Span says about an operation on x: the label that its caller has given, and the bytes."""
    size = "" if x is None else f"{x.nbytes:,} bytes"
    return ", ".join([*ledger.labels[-1:], size])


class Work:
    """Handle of a posted operation. It holds the buffers until they may be touched again.

    All ranks wait for their works in the same order among their other calls, as they post them in the same order:
    on the node's window a rank does its part of the reduction inside `wait` or `is_completed`.
    """

    def __init__(self, call, buffers, request, begin=None):
        self._begin, self._detail = begin, begin is not None and timeline_detail(buffers[0])
        self.op, self.buffers, self.peer = call.op, buffers, call.peer
        self._call, self._request, self._done, self._failure = call, request, False, None
        if request is None:   # nothing was left to wait for
            self._finish()

    def is_completed(self):
        """True once the buffers hold the result. Doesn't block; does this rank's part when all ranks have arrived. Of
        what can't be posted as one (an exact all-reduce across nodes or outside the window, a reduction by a function)
        that is several messages: it waits for the other ranks to wait, or look, too, and all must do so at the same
        place."""
        if not self._done and self._ask(self._request.test):
            self._finish()
        return self._done

    def wait(self, timeout=None):
        """Return when the buffers hold the result. TimeoutError after `timeout` seconds (None: no limit)."""
        if self._done:
            return
        state.enter(self._waiting(timeout))
        begin = ledger.now() if ledger.open_ledgers else None
        try:
            completed = self._ask(self._request.wait, timeout)
        finally:
            state.leave()
        if not completed:
            name = self._call.communicator.name
            raise TimeoutError(f"{self.op} on {name!r} (peer {self.peer}) hasn't completed within {timeout} s: "
                               "another rank hasn't called it yet, or has called it in another order")
        self._finish()
        if begin is not None:
            ledger.span("compute", "wait", begin, self._detail or "")

    def _waiting(self, timeout):
        """The Call of waiting for it: of a collective with its number, of what ends by itself with none."""
        if timeout is not None:
            return self._call._replace(number=0)
        if self._call.tag is not None:
            return self._call
        return Call(*self._call[:4], getattr(self._request, "number", 0))

    def _ask(self, call, *args):
        """What the request says. Where the ranks differ, the request is done with, and its buffers will never hold the
        result: that is said each time. What else an engine fails by, it knows itself."""
        if self._failure is not None:
            raise self._failure
        try:
            return call(*args)
        except MismatchError as error:
            self._failure = error
            raise

    def _finish(self):
        self._done = True
        for hook in self._call.communicator.hooks:
            hook.after(self.op, self.buffers[0], self.peer)
        if self._begin is not None:
            ledger.span("communication", self.op, self._begin, self._detail)


class Deferred:
    """A request of what is several messages, which can't be posted as one: it runs when waited for or asked about."""

    def __init__(self, run):
        self.run = run

    def test(self):
        return self.wait()

    def wait(self, timeout=None):
        self.run()
        return True


class Then:
    """A request, and what is left to do here when it has completed; the two are one."""

    def __init__(self, request, then):
        self.request, self.then = request, then

    def test(self):
        return self._finish(self.request.test())

    def wait(self, timeout=None):
        return self._finish(self.request.wait(timeout))

    def _finish(self, completed):
        if completed and self.then is not None:
            then, self.then = self.then, None
            then()
        return completed
