"""Who sent what to whom, and in which step: worked out from what the ranks called, without a clock between them."""

from typing import NamedTuple

SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")


class Message(NamedTuple):
    """One message that was sent and received.

    step    1, 2 …: messages that needn't wait for each other share one
    number  among the messages that src has sent, from 0
    """

    step: int
    src: int
    dst: int
    bytes: int
    number: int


def pairs(got):
    """[(src, index among its calls, dst, index among its calls)] of messages; between two ranks in order.

    got: the Outputs of all ranks
    """
    found = []
    for src, sender in enumerate(got):
        for dst, receiver in enumerate(got):
            sent = [i for i, call in enumerate(sender.calls) if call["op"] in SENDS and call["peer"] == dst]
            received = [i for i, call in enumerate(receiver.calls) if call["op"] in RECEIVES and call["peer"] == src]
            found += [(src, i, dst, j) for i, j in zip(sent, received, strict=False)]
    return found


def messages(got):
    """[Message], by step. A rank sends one message per step and receives one, both at the same time if it may.

    A message's step is later than those of all that its sender had sent before or completely received before, and, as
    it must be received, than those of all that its receiver had received before, or sent and waited for. Only the order
    of the calls on each rank is used.
    """
    both = pairs(got)
    sent_by = {(src, i): (src, i) for src, i, _, _ in both}
    received_by = {(dst, j): (src, i) for src, i, dst, j in both}
    ends = {(src, i): (dst, j) for src, i, dst, j in both}
    step = {}

    def earlier(message):
        (src, i), (dst, j) = message, ends[message]
        send, receive = got[src].calls[i], got[dst].calls[j]
        for rank, began, own in ((src, send, SENDS), (dst, receive, RECEIVES)):
            for k, call in enumerate(got[rank].calls):
                other = (sent_by if call["op"] in SENDS else received_by).get((rank, k))
                if other is None or other == message:
                    continue
                if call["op"] in own and (k < i if own is SENDS else _end(call) < _end(receive)):
                    yield other
                elif call["op"] not in own and _end(call) <= began["begin"]:
                    yield other

    def step_of(message):
        if message not in step:
            step[message] = 0      # of a cycle, which only posted receives in a strange order can make
            step[message] = 1 + max((step_of(other) for other in earlier(message)), default=0)
        return step[message]

    numbers = {}
    for src, i, _, _ in sorted(both):
        numbers[src, i] = sum(s == src for s, _ in numbers)
    return sorted(Message(step_of((src, i)), src, dst, got[src].calls[i]["bytes"], numbers[src, i])
                  for src, i, dst, _ in both)


def steps(got):
    """How many steps the messages take, one after the other."""
    return max((message.step for message in messages(got)), default=0)


def bytes_sent(got):
    """[bytes that each rank has sent]."""
    return [sum(call["bytes"] for call in rank.calls if call["op"] in SENDS) for rank in got]


def _end(call):
    return float("inf") if call["end"] is None else call["end"]
