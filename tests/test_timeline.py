"""Timelines: overlap in simulated time to the last digit, the trace of real steps, its file and its picture."""

import json

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, viz
from minitorch_dist.comm import Communicator
from minitorch_dist.comm.link import SimulatedLink, VirtualClock
from minitorch_dist.comm.local import LocalEngine
from minitorch_dist.ledger import Span
from minitorch_dist.parallel.pipelines.schedules import NAMES, one_forward_one_backward, play, zb_h1
from minitorch_dist.timeline import Timeline, intersection, length, stacks, union
from minitorch_dist.viz.timeline import COLORS, pack, timeline
from tests.crews import crews

from .timeline_cases import BUCKET_ELEMENTS, FORWARD, LAYERS

CASES = "tests.timeline_cases:"
EACH_ITS_OWN = 1e-6     # MiB per bucket
LATENCY = 2.0 ** -10    # seconds


def send_seconds(buckets, each, n, bandwidth):
    """What the link needs for so many all-reduces of so many elements of float32."""
    return buckets * (LATENCY + 2 * (n - 1) / n * 4 * each / bandwidth)


def test_who_has_asked_for_no_timeline_has_none():
    x = mt.tensor(np.ones(3), requires_grad=True)
    with ledger.record() as plain, ledger.record(timeline=True) as book:
        (x * x).sum().backward()
    assert book.spans and not plain.spans


@pytest.mark.parametrize(("n", "backward", "bandwidth"), [
    (2, 0.25, 2.0 ** 20),       # a bucket takes 1/32 s: all but the last one's transfer is hidden
    (2, 0.25, 2.0 ** 16),       # 1/2 s: communication takes longer, and hides the computation
    (4, 0.25, 2.0 ** 17),
    (4, 0.03125, 2.0 ** 18),
])
def test_a_step_takes_the_longer_of_computation_and_communication(n, backward, bandwidth):
    one = send_seconds(1, BUCKET_ELEMENTS, n, bandwidth)
    arrived = 0.0           # the closed form: bucket k is posted at (k + 1)·backward, and the link is a queue
    for k in range(LAYERS):
        arrived = max(arrived, (k + 1) * backward) + one
    compute, communication = LAYERS * backward, LAYERS * one
    for total, after_forward, seconds, _ in crews.call(CASES + "simulated_step", n, (
            backward, LATENCY, bandwidth, EACH_ITS_OWN)):
        assert after_forward == pytest.approx(arrived, rel=1e-12)
        assert max(compute, communication) < after_forward <= max(compute, communication) + max(one, backward) + 1e-9
        assert after_forward < compute + communication - 0.7 * min(compute, communication)
        assert total == pytest.approx(after_forward + LAYERS * FORWARD, rel=1e-12)
        assert seconds["forward"] == LAYERS * FORWARD and seconds["backward"] == compute
        assert seconds["wait"] == pytest.approx(arrived - compute, rel=1e-12)
        assert seconds["hidden"] == pytest.approx(arrived - backward - seconds["wait"], rel=1e-9)


def test_one_bucket_hides_nothing():
    elements = 6 * 4096     # five weights, and the counts of their users behind them
    for _, after_forward, seconds, _ in crews.call(CASES + "simulated_step", 2, (0.25, LATENCY, 2.0 ** 18, 25)):
        sending = send_seconds(1, elements, 2, 2.0 ** 18)
        assert after_forward == pytest.approx(LAYERS * 0.25 + sending, rel=1e-12)
        assert seconds["hidden"] == 0 and seconds["communication"] == pytest.approx(sending, rel=1e-12)


def test_several_of_one_kind_stand_in_a_queue_and_a_real_clock_waits():
    clock, x, y = VirtualClock(), np.zeros(8), np.zeros(8)
    link = SimulatedLink(latency=1.0, bandwidth=8.0, clock=clock)
    for array, nbytes in ((x, 8), (y, 8), (None, 0)):       # due at 2, 4 and 5
        link.before("send", array, 1)
        link.sent("send", nbytes)
    link.after("send", x, 1)
    assert clock() == 2
    link.after("send", y, 1)
    link.after("send", None, 1)
    assert clock() == 5
    link.after("recv", x, 1)        # posted before the link was there
    assert clock() == 5 and not link.due
    for _ in range(2):              # the same array twice: due at 7 and 9
        link.before("send", x, 1)
        link.sent("send", 8)
    for due in (7, 9):
        link.after("send", x, 1)
        assert clock() == due
    real = SimulatedLink(latency=0.02, bandwidth=1e9)
    begin = real.clock()
    real.before("barrier", None, None)
    real.after("barrier", None, None)
    assert real.clock() - begin >= 0.02


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1e-3, 1.0), (0.0, 0.0), (0.0, float("nan"))])
def test_a_link_that_can_not_be(latency, bandwidth):
    SimulatedLink(0.0, float("inf"))        # the fastest of all can
    with pytest.raises(ValueError, match=f"latency={latency} seconds and bandwidth={bandwidth} bytes"):
        SimulatedLink(latency, bandwidth)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_link_charges_what_the_ledger_counts(n):
    for rank in crews.call(CASES + "charges", n):
        for name, (seconds, counted) in rank.items():
            assert seconds == counted, name


def test_the_trace_of_real_steps(tmp_path):
    everyone = crews.call(CASES + "traced", 2, (str(tmp_path),))
    assert everyone[0][0] == everyone[1][0], "all ranks hear of all spans"
    spans, table = everyone[0]
    assert len(spans) == 2 and table.splitlines()[0].split()[:2] == ["rank", "forward"] and len(table.splitlines()) == 3
    for of_rank in spans:
        order = [s[1] for s in sorted(of_rank, key=lambda s: s[2]) if s[0] == "compute" and s[1] != "wait"]
        assert order == ["forward", "backward", "optimizer"] * 2
        assert all(0 <= begin <= end < 60 for _, _, begin, end, _ in of_rank)
        reduced = [s[4] for s in of_rank if s[:2] == ("communication", "all_reduce")]
        assert [text.split(",")[0] for text in reduced] == [f"bucket {k}" for k in range(6)] * 2
        assert all(text.endswith(" bytes") for text in reduced)
        assert [s[1] for s in of_rank if s[0] == "communication"][-1] == "barrier"
        backwards = [s for s in of_rank if s[1] == "backward"]
        posts = sorted(s[2] for s in of_rank if s[1] == "all_reduce")
        assert backwards[0][2] < posts[0] < backwards[0][3] < posts[6] < backwards[1][3]
    assert (tmp_path / "deeper" / "timeline.png").read_bytes()[:4] == b"\x89PNG"

    events = json.loads((tmp_path / "deeper" / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1} and all(e["dur"] >= 0 for e in slices)
    assert sum(e["name"] == "forward" for e in slices) == 4
    opened, closed = ({(e["pid"], e["id"], e["name"]): e["ts"] for e in events if e["ph"] == ph} for ph in "be")
    assert opened.keys() == closed.keys() and len(opened) == 2 * 13
    assert all(opened[key] <= closed[key] for key in opened)


def test_a_block_that_raises_gathers_nothing():
    assert crews.call(CASES + "broken", 2) == [[], []]


def test_slices_of_a_row_stand_side_by_side_or_one_in_the_other(tmp_path):
    """As trace viewers want them; passes in turns overlap."""
    times = [(2, 3), (0, 5), (1, 8), (6, 7), (8, 9), (5, 6), (8, 9)]
    spans = [Span("compute", "x", *map(float, t)) for t in times] + [Span("communication", "all_reduce", 0.0, 9.0)]
    rows = stacks(spans)
    assert rows == {0: 0, 1: 0, 2: 1, 3: 0, 4: 0, 5: 0, 6: 0}
    traced = Timeline()
    traced.spans = [spans, spans[:1]]
    traced.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [*(rows[i] for i in range(7)), 0]
    assert [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"] == [(0, 0), (0, 1), (1, 0)]


def test_sets_of_time():
    spans = [Span("compute", "a", *times) for times in ((3, 4), (0, 2), (1, 2.5), (4, 5))]
    assert union(spans) == [(0, 2.5), (3, 5)] and length(union(spans)) == 4.5
    assert union([Span("compute", "a", 0, 5), Span("compute", "a", 1, 2)]) == [(0, 5)]
    assert intersection([(0, 2), (3, 5)], [(1, 4), (4.5, 9)]) == [(1, 2), (3, 4), (4.5, 5)]
    assert intersection([(0, 2)], [(2, 3)]) == []


def test_what_a_trace_says_in_its_table_and_in_its_file(tmp_path):
    """Worked out by hand, of two ranks; the second one computes nothing."""
    traced = Timeline()
    traced.spans = [[Span("communication", "all_reduce", 2.0, 5.0, "8 bytes"),
                     Span("communication", "backward", 0.5, 2.5, "4 bytes"),
                     Span("compute", "backward", 1.0, 3.0), Span("compute", "wait", 3.0, 4.5)],
                    [Span("communication", "send", 0.5, 0.75, "4 bytes"),
                     Span("communication", "recv", 0.5, 1.0, "4 bytes")]]
    assert [line.split() for line in str(traced).splitlines()] == [
        ["rank", "backward", "wait", "communication", "hidden", "(ms)"],
        ["0", "2000.00", "1500.00", "4500.00", "3000.00"], ["1", "0.00", "0.00", "500.00", "500.00"]]
    traced.save(tmp_path / "far" / "away" / "trace.json")
    events = json.loads((tmp_path / "far" / "away" / "trace.json").read_text())["traceEvents"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        (0, 0, 1e6, 2e6), (0, 0, 3e6, 1.5e6)]
    assert [(e["ph"], e["pid"], e["tid"], e["name"], e["ts"]) for e in events if e["ph"] in "be"] == [
        ("b", 0, 0, "all_reduce (8 bytes)", 2e6), ("e", 0, 0, "all_reduce (8 bytes)", 5e6),
        ("b", 0, 0, "backward (4 bytes)", 0.5e6), ("e", 0, 0, "backward (4 bytes)", 2.5e6),
        ("b", 1, 0, "send (4 bytes)", 0.5e6), ("e", 1, 0, "send (4 bytes)", 0.75e6),
        ("b", 1, 0, "recv (4 bytes)", 0.5e6), ("e", 1, 0, "recv (4 bytes)", 1e6)]
    assert len({e["id"] for e in events if e["ph"] == "b"}) == 4        # viewers match them over all processes
    assert [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"] == [(0, 0), (1, 0)]


class Meets:
    """A hook by which a barrier takes so many seconds."""

    def __init__(self, clock):
        self.clock = clock

    def before(self, op, x, peer):
        pass

    def after(self, op, x, peer):
        if op == "barrier":
            self.clock.sleep(5)


def test_time_counts_from_where_all_have_met():
    """What began before, as a reduction that was posted, begins with the trace."""
    clock = VirtualClock()
    world = Communicator(LocalEngine(), "alone", hooks=[Meets(clock)])
    with clock.running(), ledger.record(timeline=True):
        clock.sleep(3)
        begin = ledger.now()
        with mt.trace(world) as traced:
            clock.sleep(1)
            ledger.span("communication", "all_reduce", begin)
            with ledger.spanning("compute", "backward"):
                clock.sleep(2)
    assert clock() == 3 + 5 + 1 + 2
    assert [s[1:4] for s in traced.spans[0]] == [("all_reduce", 0.0, 1.0), ("backward", 1.0, 3.0)]


def test_operations_under_way_together_lie_in_lanes_of_their_own():
    a, b, c, d = (Span("communication", n, *t) for n, t in (("a", (0, 4)), ("b", (1, 2)), ("c", (2, 5)), ("d", (4, 6))))
    assert pack([d, c, b, a]) == [(0, a), (1, b), (1, c), (0, d)]


@pytest.mark.parametrize("schedule, kinds", [(zb_h1, "FIW"), (one_forward_one_backward, "FB")])
def test_a_schedule_is_drawn_in_colours_of_its_kinds(tmp_path, schedule, kinds):
    from matplotlib import image
    path = tmp_path / "deeper" / "schedule.png"
    viz.schedule(play(schedule(2, 3)), path, "two ranks")
    seen = {tuple(c) for c in (255 * image.imread(path)[..., :3]).round().astype(int).reshape(-1, 3)}
    colours = {kind: tuple(bytes.fromhex(COLORS[NAMES[kind]][1:])) for kind in "FBIW"}
    assert len({colours[kind] for kind in kinds}) == len(kinds)
    assert seen & set(colours.values()) == {colours[kind] for kind in kinds}


def test_nothing_to_draw_raises(tmp_path):
    nothing = Timeline()
    for nothing.spans in ([], [[], []]):
        with pytest.raises(ValueError, match=r"mt\.trace"):
            timeline(nothing, tmp_path / "none.png")
