"""`python -m minitorch_dist pipeline`: a schedule as a picture, with its bubble and what each rank holds."""

import sys

from ...tables import aligned
from .schedule_blocks import BLOCKS, dates, interval_of
from .schedule_steps import Overlapped, Step, placement_of
from .schedules import SCHEDULES, SLICED, check_drawable, drawn, label, play, schedule_of


def add_command(commands, draw):
    """`minitorch-dist pipeline`: a schedule as a picture, with its bubble and what each rank holds. draw(played, path,
    title) makes the one for --out."""
    p = commands.add_parser("pipeline", help="draw a pipeline's schedule: who works when, on what")
    p.add_argument("schedule", choices=list(SCHEDULES))
    p.add_argument("--ranks", type=int, default=4, help="ranks along the pipeline (default: 4)")
    p.add_argument("--micro-batches", type=int, default=8, help="pieces of the batch (default: 8)")
    p.add_argument("--chunks", type=int, default=2, help="of layers, per rank, in interleaved (default: 2)")
    p.add_argument("--slices", type=int, default=1, help="of each micro-batch's sequences, which go one after another; "
                   f"of {', '.join(SLICED)} (default: 1)")
    p.add_argument("--both", type=int, help="cells that a forward and a backward at the same time take, in dualpipev: "
                   "2, or 3 where neither hides anything of the other (default: 3)")
    p.add_argument("--out", help="draw it into this file as well, e.g. schedule.png")
    p.set_defaults(run=_show, draw=draw)


def _show(args):
    try:
        check_drawable(args.schedule, args.ranks, args.micro_batches, args.chunks, args.slices)
        schedule = schedule_of(args.schedule, args.ranks, args.micro_batches, args.chunks, args.slices)
        both = _both(schedule, args)
    except ValueError as error:
        return _refused(error)
    played, placement = play(schedule, both=both), placement_of(schedule)
    print("\n".join([drawn(schedule, both=both), "", *_told(played, placement, both, args.slices),
                     *_pattern(args.schedule, placement)]))
    if args.out:
        try:
            args.draw(played, args.out, f"{args.schedule}: {args.ranks} ranks, {args.micro_batches} micro-batches"
                      + f" in {args.slices} slices" * (args.slices > 1))
        except (ValueError, OSError) as error:
            return _refused(error)
        print(f"drawn: {args.out}")
    return 0


def _refused(error):
    named = isinstance(error, OSError) and error.filename
    print(f"minitorch-dist pipeline: {f'{error.filename}: {error.strerror}' if named else error}", file=sys.stderr)
    return 2


def _both(schedule, args):
    """The cells of a combined step; None where there is none."""
    if not any(isinstance(step, Overlapped) for row in schedule for step in row):
        if args.both is not None:
            raise ValueError(f"--both {args.both}: no steps of {args.schedule} are combined; leave it out")
        return None
    if args.both not in (None, 2, 3):
        raise ValueError(f"--both {args.both}: a combined step takes 2 cells, as a backward alone, or up to 3")
    return args.both or 3


def _told(played, placement, both, slices):
    """What a drawing doesn't say of itself, as lines; both: the cells of a combined step, or None."""
    cut, halves = any(played.waiting), len(placement[0]) > 1
    what = ("Micro-batches" if slices == 1 else "Slices") + " of one stage" * halves
    lines = ["F: a forward; I: the gradient of a stage's input; W: those of its weights. Each takes a cell." if cut else
             "A backward takes two cells, a forward one."]
    if slices > 1:
        lines.append(f"0.1 is slice 1 of micro-batch 0; a micro-batch, whole, would take {slices} times as long.")
    if halves:
        lines.append(f"Stages by rank: {'; '.join(', '.join(map(str, row)) for row in placement)}. Large letters are "
                     "of the first ones.")
    if both:
        longest = max(played.end - sum(end - begin for begin, end, _ in row) for row in played.spans)
        lines += [f"A B, uncut, takes 2 cells. F3&b1, a forward and a backward at the same time, takes {both} cells "
                  "together, 3 if neither hid a message of the other.",
                  f"The rank that waits longest does so for {longest:.0f} cell{'s' * (longest != 1)}, "
                  "(p-1)·(F&B + B - 3W)."]
    lines.append(f"The ranks wait for {100 * played.bubble:.1f} % of the time (the bubble).")
    if played.period < played.end:
        lines.append("If none waited for the others before it began the next batch: for "
                     f"{100 * played.steady_bubble:.1f} %.")
    lines.append(f"{what} whose activations a rank holds at once: {', '.join(map(str, played.live))}.")
    if cut:
        lines.append(f"{what} whose W is still to come: {', '.join(map(str, played.waiting))}; together with those "
                     f"above at most {', '.join(map(str, played.held))} at once.")
    return lines


def _pattern(name, placement):
    """The building block of a schedule that repeats one, as lines."""
    if name not in BLOCKS:
        return []
    block = BLOCKS[name]
    rows = [[f"rank {rank}", *(f"{label(Step(kind, 0, stage), own)} {slot}"
                               for (kind, stage), slot in sorted(row.items(), key=lambda item: item[1]))]
            for rank, (row, own) in enumerate(zip(dates(block, len(placement)), placement, strict=True))]
    return [f"What it repeats every {interval_of(block)} cells, before it is squeezed, and in which cells:",
            *aligned(rows, left=len(rows[0]))]
