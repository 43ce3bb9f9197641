"""Schedules made of building blocks against the paper's slots, memory and bubbles, and a simulation of their own."""

import itertools
from math import ceil

import pytest

from minitorch_dist.__main__ import main
from minitorch_dist.parallel.pipelines import schedule_blocks
from minitorch_dist.parallel.pipelines.schedule_blocks import BLOCKS, Block, dates, of_block, repeated, squeezed
from minitorch_dist.parallel.pipelines.schedule_steps import Step, placement_of, v_shaped
from minitorch_dist.parallel.pipelines.schedules import SCHEDULES, one_forward_one_backward, play, v_half, v_min

SHARE = {"zb-v": lambda p: p, "v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}     # of micro-batches


def simulated(schedule, times):
    """(end, by rank: the most halves of micro-batches held at one time, from F's beginning to W's end). Time passes by
    ones; a rank that is idle begins its next step as soon as the path of the micro-batch has come there."""
    last, rest, now = 2 * len(schedule) - 1, [list(row) for row in schedule], 0
    free, passed, made = [0] * len(schedule), {}, {}        # passed: steps of a micro-batch's path, 0 to 2·last + 1
    spans = [[] for _ in schedule]
    while any(rest):
        for rank, row in enumerate(rest):
            while row and free[rank] <= now:
                kind, k, stage, _ = row[0]
                place = stage if kind == "F" else 2 * last + 1 - stage
                if kind == "W":
                    ready = (k, place) in made and made[k, place] <= now
                else:
                    ready = passed.get(k, 0) == place and made.get((k, place - 1), 0) <= now
                if not ready:
                    break
                free[rank] = now + times["FIW".index(kind)]
                if kind != "W":
                    passed[k], made[k, place] = place + 1, free[rank]
                spans[rank].append((now, free[rank], row.pop(0)))
        now += 1
        assert now < 100_000
    most = []
    for row in spans:
        begins = {step[1:]: begin for begin, _, step in row if step.kind == "F"}
        ends = {step[1:]: end for _, end, step in row if step.kind == "W"}
        most.append(max(sum(begins[key] <= at < ends[key] for key in begins) for at in begins.values()))
    return max(free), most


@pytest.mark.parametrize("p", range(2, 18))
def test_the_slots_are_the_paper_s(p):
    """V-Min and V-Half as the authors give them, their pauses before backward included."""
    pause = {"v-min": 2 if p % 3 == 0 else 0, "v-half": 3 if p % 2 == 0 else 0}
    for r in range(p):
        a, b, c = r, 2 * p - 1 - r, pause["v-min"]
        wanted = {("F", a): r, ("F", b): 2 * p - 1 - r, ("I", b): 2 * p + c + r, ("I", a): 4 * p + c - 1 - r}
        assert wanted.items() <= dates(BLOCKS["v-min"], p)[r].items()
        c = pause["v-half"]
        wanted = {("F", a): 2 * r, ("F", b): 3 * p - 2 - r, ("I", b): 3 * p - 1 + c + 2 * r,
                  ("I", a): 6 * p + c - 2 - r}
        assert wanted.items() <= dates(BLOCKS["v-half"], p)[r].items()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("p", range(1, 9))
def test_no_two_steps_of_a_rank_meet(name, p):
    for row in dates(BLOCKS[name], p):
        assert {slot % 6 for slot in row.values()} == set(range(6))
        assert all(slot > row["I", stage] for (kind, stage), slot in row.items() if kind == "W")


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 16])
def test_memory_is_the_paper_s_on_all_ranks(name, p):
    """Of m ≥ 2p micro-batches ⌊(p+4)/3⌋, ⌊(p+2)/2⌋, p, in halves; squeezing takes no more than the pattern itself."""
    for m in (2 * p, 2 * p + 3):
        schedule = SCHEDULES[name](p, m)
        end, most = simulated(schedule, (1, 1, 1))
        played = play(schedule, 1, 2)
        assert most == played.held == [2 * SHARE[name](p)] * p and placement_of(schedule) == v_shaped(p)
        assert end == played.end <= play(repeated(BLOCKS[name], p, m)).end
        assert max(play(repeated(BLOCKS[name], p, m)).held) == most[0]


@pytest.mark.parametrize("p, m", [(3, 6), (3, 11), (4, 8), (4, 13), (5, 10), (6, 19), (8, 16), (8, 21), (9, 18),
                                  (16, 32)])
def test_bubbles_are_a_half_and_two_thirds_of_1f1b_s(p, m):
    """The authors' rates, p/2m and 2p/3m to 1F1B's p/m, and the exact numbers of the docstrings, whatever m ≥ 2p."""
    one = 6 * (p - 1)
    half, least, none = (play(SCHEDULES[name](p, m)).period - 6 * m for name in ("v-half", "v-min", "zb-v"))
    assert play(one_forward_one_backward(p, m), 2, 4).end - 6 * m == one
    assert half == ((13 * p - 17) // 4 if p % 2 else 3 * p - 7) and half < 0.55 * one
    assert least == 4 * p - (5 if p % 3 else 7) and least < 2 / 3 * one and none == 0


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 9])
def test_any_number_of_ranks_and_micro_batches(name, p, m):
    """Complete, whatever there are; in the order that exact mode wants; other times are simulated alike."""
    schedule = SCHEDULES[name](p, m)
    for times in ((1, 1, 1), (2, 3, 1), (3, 2, 4)):
        played = play(schedule, times[0], times[1] + times[2], weight=times[2])
        end, most = simulated(schedule, times)
        assert end == played.end and all(a <= b for a, b in zip(most, played.held, strict=True))
    assert max(played.held) <= min(2 * m, 2 * SHARE[name](p))
    if m == 1 < p:
        assert play(schedule).end == 4 * p + 1      # there and back twice, and W of the first stage
    for row in schedule:
        for kind, stage in itertools.product("FIW", {step.stage for step in row}):
            assert [s.micro_batch for s in row if (s.kind, s.stage) == (kind, stage)] == list(range(m))


@pytest.mark.parametrize("times, grows", [
    ((5, 6, 4), False), ((2, 2, 1), False), ((4, 4, 1), False), ((2, 3, 2), False),
    ((2, 3, 1), True), ((3, 2, 1), True)])
def test_where_v_half_waits_at_its_ends_only(times, grows):
    """Qi et al. 2024: where T_W + 2T_I ≥ 2T_F and T_W + 2T_F ≥ 2T_I, it repeats without a bubble."""
    f, i, w = times
    assert grows == (w + 2 * i < 2 * f or w + 2 * f < 2 * i)
    few, many = (play(v_half(4, m), f, i + w, weight=w).period - 2 * m * (f + i + w) for m in (8, 24))
    assert (many > few) == grows


def test_1f1b_is_a_block():
    """Of one stage per rank: a slot forward, two backward; its B is cut into I and W, one behind the other."""
    for p, m in ((1, 3), (2, 5), (4, 6), (5, 3)):
        cut = [[part for step in row for part in ([step] if step.kind == "F" else [step._replace(kind="I"),
                                                                                  step._replace(kind="W")])]
               for row in one_forward_one_backward(p, m)]
        assert repeated(Block((1, 2)), p, m) == cut
        assert play(of_block(Block((1, 2)), p, m)).end <= play(cut).end


def test_blocks_of_one_s_own():
    """V's with ways of up to four slots: done, no later than their pattern and with no more memory; or refused. What a
    rank holds is its stages' holds by the interval, each rounded up at most, as in the paper."""
    refused = 0
    for there, back, turn in itertools.product(range(1, 5), range(1, 5), (1, 2)):
        block, p, m = Block((there, back, there, back), (1, turn)), 3, 9
        try:
            rows = dates(block, p)
        except ValueError as error:
            refused += 1
            assert "on 3 ranks" in str(error) and "take other slots" in str(error)
            continue
        before, after = play(repeated(block, p, m)), play(of_block(block, p, m))
        assert after.end <= before.end and max(after.held) <= max(before.held)
        for row, own, held in zip(rows, v_shaped(p), before.held, strict=True):
            holds = [(row["W", s] + 1 - row["F", s]) / 6 for s in own]
            assert sum(holds) <= held <= sum(map(ceil, holds))
    assert 0 < refused < 32
    rows = dates(Block((1, 1, 1, 2), (1, 2)), 2)        # after every other turn than five slots two steps meet
    assert [row["I", s] for row, s in zip(rows * 2, (3, 2, 0, 1), strict=True)] == [8, 9, 13, 11]
    for block in (Block((1, 2, 1)), Block((1, 2, 1, 2), (1,)), Block((0, 2)), Block((1, 1, 1, 1), (1, -1))):
        with pytest.raises(ValueError, match="of a slot at least; got Block"):
            dates(block, 3)


def test_v_min_drawn_by_hand():
    """Three ranks, whose first pattern is F, f, a pause of two slots, i, I: squeezed."""
    made = v_min(3, 2)
    assert [" ".join(f"{s.kind}{s.micro_batch}.{s.stage}" for s in row) for row in made] == [
        "F0.0 F1.0 F0.5 I0.5 W0.5 F1.5 I1.5 W1.5 I0.0 W0.0 I1.0 W1.0",
        "F0.1 F1.1 F0.4 F1.4 I0.4 W0.4 I0.1 I1.4 W0.1 W1.4 I1.1 W1.1",
        "F0.2 F0.3 F1.2 F1.3 I0.3 I0.2 W0.3 W0.2 I1.3 I1.2 W1.3 W1.2"]


def test_squeezing_leaves_room():
    """One micro-batch behind the other, with room for two halves: while the first rank waits for the first one's way
    back, the second one's F would take its place."""
    there = [[Step(kind, k, stage) for k in range(3) for kind, stage in (("F", a), ("F", b), ("I", b), ("W", b),
                                                                         ("I", a), ("W", a))] for a, b in v_shaped(2)]
    made = squeezed(there)
    assert made[0][:2] == [Step("F", 0, 0), Step("F", 0, 3)] and play(made).held == [2, 2]
    assert play(made).end < play(there).end
    with pytest.raises(ValueError, match="rank 0 before W0 of stage 0, rank 1 before I0 of stage 1"):
        squeezed([[Step("W", 0, 0), Step("I", 0, 0)], [Step("I", 0, 1), Step("F", 0, 1)]])


def test_the_documented_block():
    for row in dates(BLOCKS["v-min"], 2):
        assert f"\n    {row}\n" in schedule_blocks.__doc__


def test_the_command_shows_the_pattern(capsys):
    assert main(["pipeline", "v-half", "--ranks", "2", "--micro-batches", "4"]) == 0
    said = capsys.readouterr().out
    assert "every 6 cells" in said and "\nrank 0  F0 0  f0 4  i0 8   w0 9   I0 13  W0 17\n" in said
    assert "0, 3; 1, 2." in said and "at most 4, 4 at once" in said


@pytest.mark.parametrize("make", [v_half, v_min])
@pytest.mark.parametrize("sizes", [(0, 1), (2, 0)])
def test_what_makes_no_schedule(make, sizes):
    with pytest.raises(ValueError, match=f"got {sizes[0]} and {sizes[1]}"):
        make(*sizes)
