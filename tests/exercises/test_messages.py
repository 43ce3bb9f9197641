"""The steps of messages, on logs of calls that are written by hand."""

from exercises.frame.check import Outputs
from exercises.frame.messages import bytes_sent, messages, steps


def ranks(*programs):
    """Outputs of ranks that called "s1" (send to 1), "r0" (receive from 0), "i1" (post a send), "w" (wait for it)."""
    found = []
    for program in programs:
        calls, now = [], 0.0
        for word in program.split():
            now += 1.0
            if word == "w":
                next(call for call in calls if call["end"] is None)["end"] = now
                continue
            op = {"s": "send", "r": "recv", "i": "isend", "j": "irecv"}[word[0]]
            calls.append({"op": op, "peer": int(word[1]), "bytes": 8, "begin": now, "line": 1,
                          "end": now + 0.5 if op in ("send", "recv") else None})
        outputs = Outputs()
        outputs.calls = calls
        found.append(outputs)
    return found


def test_a_flat_broadcast_takes_a_step_per_message():
    got = ranks("s1 s2 s3", "r0", "r0", "r0")
    assert [(m.step, m.src, m.dst, m.number) for m in messages(got)] == [(1, 0, 1, 0), (2, 0, 2, 1), (3, 0, 3, 2)]
    assert bytes_sent(got) == [24, 0, 0, 0]


def test_a_tree_takes_two():
    assert steps(ranks("s1 s2", "r0 s3", "r0", "r1")) == 2
    assert steps(ranks("s2 s1", "r0", "r0 s3", "r2")) == 2
    assert steps(ranks("s1 s2", "r0", "r0 s3", "r2")) == 3      # who has to pass it on gets it last


def test_a_gather_waits_at_its_root():
    assert steps(ranks("r1 r2 r3", "s0", "s0", "s0")) == 3


def test_posted_messages_travel_together():
    assert steps(ranks("i1 r2 w", "i2 r0 w", "i0 r1 w")) == 1
    assert steps(ranks("j2 s1 w", "j0 s2 w", "j1 s0 w")) == 1
    assert steps(ranks("i1 r2 w i1 r2 w", "i2 r0 w i2 r0 w", "i0 r1 w i0 r1 w")) == 2


def test_blocking_messages_wait_for_each_other():
    assert steps(ranks("s1 r1", "r0 s0")) == 2
    assert steps(ranks("s1 r2", "s2 r0", "r1 s0")) == 3         # 2 takes 1's, then 1 takes 0's, then 0 takes 2's


def test_what_nobody_receives_is_no_message():
    assert [(m.src, m.dst) for m in messages(ranks("s1 s1", "r0"))] == [(0, 1)]
