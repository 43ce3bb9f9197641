"""Messages from one rank to another: send and receive, now or posted, and from whoever comes first."""

import time

import numpy as np

from . import check
from .shared import give_way
from .state import Call, state

ENVELOPE, PART = 0, 1       # tags of messages in parts
EAGER_LOOKS = 500            # for a message from anybody, before the rank lets others have the core for LOOK_EVERY
LOOK_EVERY = 1e-4           # seconds


class Messages:
    """What a Communicator has of them."""

    def send(self, x, dst, tag=0):
        """Send x to rank dst, who calls recv with the same tag, shape and dtype. May return before it has."""
        self._send("send", x, dst, check.tag("send", tag))

    def isend(self, x, dst, tag=0):
        """Post a send; a Work."""
        return self._send("isend", x, dst, check.tag("isend", tag))

    def recv(self, x, src, tag=0):
        """Receive rank src's message with this tag into x. RuntimeError if it has another number of bytes."""
        self._recv("recv", x, src, check.tag("recv", tag))

    def irecv(self, x, src, tag=0):
        """Post a receive; a Work."""
        return self._recv("irecv", x, src, check.tag("irecv", tag))

    def isend_parts(self, parts, dst):
        """Post a message of several arrays of bytes (uint8, 1-d, of any lengths), the first of which should be short;
        a list of Works. Rank dst takes it by recv_any.

            tag 0   envelope: [number of parts, their lengths (int64) | the first part]
            tag 1   the second part, the third …            untouched and uncopied until its Work has been waited for

        The ledger counts the first under "envelope", the others under "send". A communicator that is used so sends no
        other messages with these tags: take one of its own (split).
        """
        check.rank("isend_parts", "dst", dst, self.size, own=self.rank)
        if not parts:
            raise ValueError("isend_parts: no parts; a message has one at least, which may be empty")
        for i, part in enumerate(parts):
            check.of_bytes("isend_parts", f"parts[{i}]", part)
        sizes = np.array([len(parts), *(part.nbytes for part in parts)], np.int64)
        envelope = np.concatenate([sizes.view(np.uint8), parts[0]])
        return [self._send("isend", envelope, dst, ENVELOPE, counted="envelope"),
                *(self._send("isend", part, dst, PART) for part in parts[1:])]

    def recv_any(self, timeout=None):
        """(the sender's rank, its parts) of the message in parts that came first; None where none has come within
        `timeout` seconds (0: look once; None: no limit). Waiting, this rank waits for all the others: one that leaves
        the program, or dies, ends the job (comm/guard.py); who looks again and again gets a RuntimeError of it."""
        found = self._engine.probe(ENVELOPE)
        if found is None and timeout != 0:
            found = self._wait_for_any(timeout)
        if found is None:
            state.look(Call(self, "recv_any"))
            return None
        src, nbytes = found
        envelope = np.empty(nbytes, np.uint8)
        self._recv("recv", envelope, src, ENVELOPE)
        count = int(envelope[:8].view(np.int64)[0])
        sizes = envelope[8:8 * (count + 1)].view(np.int64)
        parts = [envelope[8 * (count + 1):], *(np.empty(size, np.uint8) for size in sizes[1:].tolist())]
        for part in parts[1:]:
            self._recv("recv", part, src, PART)
        return src, parts

    def _wait_for_any(self, timeout):
        limit = None if timeout is None else time.monotonic() + timeout
        looks = 0
        state.enter(Call(self, "recv_any", number=0))
        try:
            while (found := self._engine.probe(ENVELOPE)) is None and (limit is None or time.monotonic() < limit):
                looks += 1
                give_way() if looks < EAGER_LOOKS else time.sleep(LOOK_EVERY)
            return found
        finally:
            state.leave()

    def _send(self, op, x, dst, tag, counted="send"):
        """A message, posted where op is "isend", with a tag of any kind; the ledger counts it as `counted`."""
        check.array(op, "x", x)
        check.rank(op, "dst", dst, self.size, own=self.rank)
        call, _ = self._begin(op, x, dst, number=0)
        self._count_bytes(counted, x.nbytes, x.nbytes if dst in self._elsewhere else 0)
        posted = op == "isend"
        message = self.token, self.world_ranks[dst], tag
        state.sent[message] = state.sent.get(message, 0) + 1
        return self._do(call, (x,), posted, lambda: self._messenger_of(x).send(x, dst, tag, posted))

    def _recv(self, op, x, src, tag):
        """The other side of _send, posted where op is "irecv"."""
        check.array(op, "x", x, written=True)
        check.rank(op, "src", src, self.size, own=self.rank)
        message = self.token, self.world_ranks[src], tag
        number = state.received.get(message, 0) + 1
        call, _ = self._begin(op, x, src, None, number, tag)
        self._count("recv", x.nbytes)
        posted = op == "irecv"
        work = self._do(call, (x,), posted, lambda: self._messenger_of(x).recv(x, src, tag, posted))
        state.received[message] = number      # if it has raised none was taken, as far as is known
        return work
