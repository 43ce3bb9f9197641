"""Messages from one rank to another: send and receive, now or posted."""

from . import check
from .state import Call


class Messages:
    """What a Communicator has of them."""

    def send(self, x, dst, tag=0):
        """Send x to rank dst, who calls recv with the same tag, shape and dtype. May return before it has."""
        self._send("send", x, dst, tag, False)

    def isend(self, x, dst, tag=0):
        """Post a send; a Work."""
        return self._send("isend", x, dst, tag, True)

    def recv(self, x, src, tag=0):
        """Receive rank src's message with this tag into x. RuntimeError if it has another number of bytes."""
        self._recv("recv", x, src, tag, False)

    def irecv(self, x, src, tag=0):
        """Post a receive; a Work."""
        return self._recv("irecv", x, src, tag, True)

    def _send(self, call, x, dst, tag, async_op):
        check.array(call, "x", x)
        check.rank(call, "dst", dst, self.size, own=self.rank)
        check.tag(call, tag)
        return self._send_unchecked(call, x, dst, tag, async_op)

    def _send_unchecked(self, call, x, dst, tag, async_op):
        call = Call(self, call, x, dst)
        self._begin(call)
        self._count_bytes("send", x.nbytes, x.nbytes if dst in self._elsewhere else 0)
        return self._do(call, (x,), async_op, lambda: self._messenger_of(x).send(x, dst, tag, async_op))

    def _recv(self, call, x, src, tag, async_op):
        check.array(call, "x", x, written=True)
        check.rank(call, "src", src, self.size, own=self.rank)
        check.tag(call, tag)
        return self._recv_unchecked(call, x, src, tag, async_op)

    def _recv_unchecked(self, call, x, src, tag, async_op):
        call = Call(self, call, x, src)
        self._begin(call)
        self._count("recv", x.nbytes)
        return self._do(call, (x,), async_op, lambda: self._messenger_of(x).recv(x, src, tag, async_op))
