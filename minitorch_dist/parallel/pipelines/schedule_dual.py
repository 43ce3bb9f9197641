"""DualPipeV: forward and backward of two micro-batches at the same time, so that one hides the other's messages.

    print(drawn(dual_pipe_v(2, 5), both=2))

    rank 0  F0 F1 F2 f0 i0 w0 f1 F3&b1 .. f2&B0 F4&b2 f3&B1 b3 b3 f4&B2 b4 b4 I3 W3 I4 W4
    rank 1  .. F0 f0 F1 f1 F2 b0 b0 f2&B0 F3&b1 f3&B1 F4&b2 f4&B2 b3 b3 B3 B3 i4 I4 w4 W4

An expert layer waits for the all-to-all to its experts, and for the one back. The other half of a combined step, F3&b1,
has products to fill that time with (parallel/turns.py). Two stages per rank, placed as a V: where a micro-batch comes
by on its way there, another does on its way back. Where T_I = T_F ≥ T_W, and T_F&B, the time of a combined step, is T_B
at least, the rank that waits longest does so for

    (p-1)·(T_F&B + T_B - 3·T_W)         T_B = T_I + T_W; in the sources, which count the stages, PP = 2p

whatever m ≥ 2p, and each rank holds 2p+1 halves of a micro-batch, W's included. Sources: DeepSeek-AI 2024, "DeepSeek-V3
technical report", 3.2.1: DualPipe, in which micro-batches come in at both ends, so that each stage is needed on two
ranks. Qi et al. 2025, "DualPipe could be better without the Dual", and DeepSeek's program DualPipeV: half of it does.
"""

from collections import deque

from .schedule_steps import INPUT, WEIGHT, Overlapped, Step, check_sizes, v_shaped


def phases(ranks, micro_batches, rank):
    """What a rank does, [(times, letters)]: the next F, B or I of its first stage, in small letters of its second;
    W: the weight gradients, of either, that have waited longest; F&b: both at the same time."""
    behind, steady, filled = ranks - 1 - rank, micro_batches - 2 * ranks + rank + 1, rank + 1
    return [(2 * behind, "F"), (rank + 1, "F f"), (behind, "i W f"),
            *([(steady, "F&b f&B")] if behind else [(1, "F b f&B"), (steady - 1, "F&b f&B")]),
            (behind, "b f&B"),
            (filled // 2, "b B"), (filled % 2, "b I"), (filled // 2, "i I"),    # from the middle on W waits for the end
            (behind, "W I"), (filled, "W")]


def dual_pipe_v(ranks, micro_batches):
    """DualPipeV; see above. ValueError of fewer micro-batches than there are stages, 2·ranks."""
    check_sizes(ranks, micro_batches)
    if micro_batches < 2 * ranks:
        raise ValueError(f"dualpipev: {micro_batches} micro-batches on {ranks} ranks; it takes as many as there are "
                         f"stages, {2 * ranks}, or more")
    return [_row(phases(ranks, micro_batches, rank), stages) for rank, stages in enumerate(v_shaped(ranks))]


def _row(phases, stages):
    """The steps of a rank that has these two stages."""
    row, waiting, next_of = [], deque(), {}

    def step(letter, kind=Step):
        way, chunk = letter in "Ff", letter.islower()       # B's and I's of a stage are one sequence
        k = next_of[way, chunk] = next_of.get((way, chunk), -1) + 1
        return kind(letter.upper(), k, stages[chunk])
    for times, text in phases:
        for letters in text.split() * times:
            if letters == WEIGHT:
                row.append(waiting.popleft())
                continue
            first, _, other = letters.partition("&")
            row += [step(first, Overlapped), step(other)] if other else [step(first)]
            if row[-1].kind == INPUT:
                waiting.append(row[-1]._replace(kind=WEIGHT))
    return row
