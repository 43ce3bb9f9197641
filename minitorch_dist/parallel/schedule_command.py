"""`python -m minitorch_dist pipeline`: a schedule as a picture, with its bubble and what each rank holds."""

from pathlib import Path

from ..tables import aligned
from .schedule_blocks import BLOCKS, dates, interval_of
from .schedule_steps import Step, placement_of
from .schedules import SCHEDULES, drawn, label, play, schedule_of


def add_command(commands, draw):
    """`minitorch-dist pipeline`: a schedule as a picture, with its bubble and what each rank holds. draw(played, path,
    title) makes the one for --out."""
    p = commands.add_parser("pipeline", help="draw a pipeline's schedule: who works when, on what")
    p.add_argument("schedule", choices=list(SCHEDULES))
    p.add_argument("--ranks", type=int, default=4, help="ranks along the pipeline (default: 4)")
    p.add_argument("--micro-batches", type=int, default=8, help="pieces of the batch (default: 8)")
    p.add_argument("--chunks", type=int, default=2, help="of layers, per rank, in interleaved (default: 2)")
    p.add_argument("--out", help="draw it into this file as well, e.g. schedule.png")
    p.set_defaults(run=_show, draw=draw)


def _show(args):
    try:
        schedule = schedule_of(args.schedule, args.ranks, args.micro_batches, args.chunks)
    except ValueError as error:
        print(f"minitorch-dist pipeline: {error}")
        return 2
    played = play(schedule)
    placement = placement_of(schedule)
    print("\n".join([drawn(schedule), "", *_told(played, placement), *_pattern(args.schedule, placement)]))
    if args.out:
        try:
            if not Path(args.out).suffix:
                raise ValueError(f"--out {args.out} needs an ending, as in schedule.png")
            args.draw(played, args.out, f"{args.schedule}: {args.ranks} ranks, {args.micro_batches} micro-batches")
        except (ValueError, OSError) as error:
            print(f"minitorch-dist pipeline: {error}")
            return 2
        print(f"drawn: {args.out}")
    return 0


def _told(played, placement):
    """What a drawing doesn't say of itself, as lines."""
    cut, halves = any(played.waiting), len(placement[0]) > 1
    what = "Micro-batches of one stage" if halves else "Micro-batches"
    lines = ["F: a forward; I: the gradient of a stage's input; W: those of its weights. Each takes a cell." if cut else
             "A backward takes two cells, a forward one."]
    if halves:
        lines.append(f"Stages by rank: {'; '.join(', '.join(map(str, row)) for row in placement)}. Large letters are "
                     "of the first ones.")
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
