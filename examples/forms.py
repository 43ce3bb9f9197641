"""One small GPT, cut in every way: what each of four ranks holds and sends, counted, as a picture.

    mpirun -n 4 python examples/forms.py --out runs/forms
    mpirun -n 2 python examples/forms.py                # on any number of ranks that the model can be cut for

Each form of parallelism takes the same steps on the same batches, by examples/mesh.py's parts; the last column is how
far its losses are from those of data parallelism. Held are the most bytes of any rank in the last step: parameters and
optimizer state between steps; gradients, activations and buffers (what is gathered, or on its way) at their highest.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minitorch_dist import comm, ledger, program
from minitorch_dist.viz.figure import drawn

sys.path.insert(0, str(Path(__file__).parent))      # also where another program runs this file
import mesh  # noqa: E402

FORMS = {       # name -> the options of mesh.py; N: all ranks
    "data parallel": "",
    "ZeRO 1": "--zero 1",
    "ZeRO 2": "--zero 2",
    "ZeRO 3": "--zero 3",
    "tensor": "--tp N",
    "+ sequence": "--tp N --sequence-parallel",
    "ring": "--cp N",
    "all-to-all": "--cp N --cp-by all_to_all",
    "pipeline": "--pp N --micro-batches 4",
    "+ slices": "--pp N --micro-batches 4 --slices 4",
    "ZeRO 1 × tensor": "--tp N/2 --zero 1",
}
MODEL = "--layers 8 --heads 4 --dim 128 --length 64 --batch-size 8 --dtype float64"
STEPS = 3       # of which the last is counted: the first makes the optimizer's state
HELD = {"parameters": "#4878a8", "gradients": "#d98b3a", "optimizer": "#6aa56a", "activations": "#b5524f",
        "buffers": "#8f7bb0"}
PEAKS = {"gradients": "gradient", "activations": "activation", "buffers": "buffer"}
TEXT = Path(__file__).parents[1] / "README.md"


class Counted(NamedTuple):
    """Of a form: bytes held by kind and sent, the most of any rank; each step's loss."""

    held: dict
    sent: int
    losses: list


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="forms.py", description=__doc__)
    p.add_argument("--text", type=Path, default=TEXT, help="a UTF-8 file to learn (default: the README)")
    p.add_argument("--forms", default=",".join(FORMS), help="which ones, separated by commas")
    p.add_argument("--out", type=Path, help="folder for the picture, forms.png")
    args = p.parse_args(argv)
    args.forms = [name.strip() for name in args.forms.split(",")]
    if strange := [name for name in args.forms if name not in FORMS]:
        p.error(f"--forms {','.join(strange)}: there are {', '.join(FORMS)}")
    return args


def options(name, ranks, text):
    """mesh.py's arguments for a form on so many ranks."""
    half = max(1, ranks // 2)
    chosen = FORMS[name].replace("N/2", str(half)).replace("N", str(ranks))
    return mesh.parse([*MODEL.split(), "--micro-batches", "1", *chosen.split(), "--text", str(text)])


def count(args, world):
    """Train for some steps; the Counted. Collective."""
    grid, task = mesh.mesh_of(args, world), mesh.Task(args)
    args.micro_batches = mesh.micro_batches_of(args, grid)
    pipeline, loader, optimizer, *_ = mesh.prepare(args, task, grid)
    losses, batches = [], loader.epoch(0)
    for number in range(STEPS):
        with ledger.record(memory=True) as book:
            losses.append(mesh.step(args, number, next(batches), task.units, grid, pipeline, optimizer))
    held = {"parameters": book.live["parameter"], "optimizer": book.live["optimizer"]} | {
        name: book.peak[kind] for name, kind in PEAKS.items()}
    # A stage's input counts as a parameter while it is there.
    held["activations"] += book.peak["parameter"] - book.live["parameter"]
    everyone = world.all_gather_object((held, book.total_bytes_sent()))
    return Counted({name: max(mine[name] for mine, _ in everyone) for name in HELD},
                   max(sent for _, sent in everyone), losses)


def table(found):
    """As lines: kB by form, and how far the losses are from the first form's."""
    first = next(iter(found.values()))
    rows = [["kB of a rank", *HELD, "sent", "max |Δloss|"]]
    for name, counted in found.items():
        far = np.abs(np.subtract(counted.losses, first.losses)).max()
        rows.append([name, *(f"{counted.held[kind] / 1e3:,.0f}" for kind in HELD), f"{counted.sent / 1e3:,.0f}",
                     "" if counted is first else f"{far:.0e}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]


def picture(found, path, ranks):
    """Bars: what a rank holds, one kind on the other, and what it sends in a step."""
    names, at = list(found), np.arange(len(found))
    with drawn(path, (9, 5.6)) as figure:
        holds, sends = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        bottom = np.zeros(len(found))
        for kind, color in HELD.items():
            height = np.array([found[name].held[kind] / 1e6 for name in names])
            holds.bar(at, height, 0.62, bottom, color=color, label=kind)
            bottom += height
        holds.set_ylim(0, 1.04 * bottom.max())
        holds.set_ylabel("MB that a rank holds")
        holds.legend(fontsize=9, ncols=len(HELD), loc="upper center", bbox_to_anchor=(0.5, 1.14), frameon=False)
        sends.bar(at, [found[name].sent / 1e6 for name in names], 0.62, color="#777777")
        sends.set_ylabel("MB that it sends\nin a step")
        sends.set_xticks(at, names, rotation=25, ha="right")
        sends.set_xlabel(f"one GPT, one batch, {ranks} ranks")


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be cut."""
    with program.usage_errors("forms.py"):
        world = comm.world()
        args = parse(argv)
        chosen = {name: options(name, world.size, args.text) for name in args.forms}
        program.make_folder(args.out, world)
        found = {name: count(each, world) for name, each in chosen.items()}
    if world.rank == 0:
        print("\n".join(table(found)))
        if args.out:
            picture(found, args.out / "forms.png", world.size)
            print(f"the picture: {args.out / 'forms.png'}")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
