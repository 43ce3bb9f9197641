"""A GPT that has learned with short sequences reads long ones, with its rotary angles stretched in one way or another.

    python examples/stretch.py
    mpirun -n 2 python examples/stretch.py --stretch 8 --tune 120
    python examples/stretch.py --text play.txt --length 128

It trains on windows of --length characters. Then, in each way, the same parameters
read held-back windows that are --stretch times as long, and are trained on such for
--tune steps more. How good it is at each position is printed by quarters of a window,
and drawn: runs/stretch/stretch.png.
"""

import sys
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, nn, optim, program, training
from minitorch_dist.data import Loader
from minitorch_dist.data.text import Windows, read_text
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.viz.figure import drawn

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADS, SIZE = 4, 16
MODEL = FAMILIES["llama"] | {"layers": 2, "heads": HEADS, "dim": HEADS * SIZE, "hidden": 176}
BASE = 10_000
EVAL_WINDOWS, EVAL_CHUNK = 64, 16
QUARTERS = 4


def ways(length, stretch):
    """{name: the Rotary} of a model that has learned with `length` positions.

    A larger base slows the slowest pair down `stretch` times and the fastest not at all. YaRN's blend is from 1 turn to
    32, of 4,096 positions; so short as these are here, few pairs make a whole turn, and it begins at a quarter.
    Source: Peng et al. 2023, "YaRN", sections 3.1 and 3.2.
    """
    return {"as it is": nn.Rotary(BASE),
            "interpolated": nn.Rotary(BASE, stretch, blend=None, sharpness=0),
            "a larger base": nn.Rotary(BASE * stretch ** (SIZE / (SIZE - 2))),
            "YaRN": nn.Rotary(BASE, stretch, length, blend=(0.25, 2))}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="stretch.py", description=__doc__)
    p.add_argument("--length", type=int, default=64, help="characters of the windows that it learns with")
    p.add_argument("--stretch", type=int, default=4, help="how many times longer are those that it reads then")
    p.add_argument("--steps", type=int, default=600, help="optimizer steps on short windows")
    p.add_argument("--tune", type=int, default=60, help="optimizer steps on long windows, in each way")
    p.add_argument("--batch-size", type=int, default=16, help="short windows per step, and --stretch times fewer long "
                   "ones: as many characters")
    p.add_argument("--text", type=Path, help="a UTF-8 file to learn (default: this project's own texts)")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    p.add_argument("--out", type=Path, default=Path("runs/stretch"), help="folder for the picture")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("length", "steps", "batch_size"), program.AT_LEAST_0: ("tune", "seed")})
    if args.stretch < 2 or args.length * args.stretch % QUARTERS:
        p.error(f"--stretch {args.stretch}: 2 or more, and --length · --stretch a multiple of {QUARTERS}")
    if args.batch_size % args.stretch:
        p.error(f"--batch-size {args.batch_size} must be a multiple of --stretch {args.stretch}")
    return args


def gpt(text, length, rotary):
    """A model for so many positions."""
    return nn.GPT(len(text.vocabulary), length, **MODEL | {"positions": rotary})


def loss_sum(model, shard):
    """The sum of the losses of all characters here."""
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def train(args, model, text, world, length, steps, lr):
    """Train it in place, on windows of this length; no steps: not at all."""
    if steps == 0:
        return
    model = DistributedDataParallel(model, world)
    optimizer = optim.AdamW(training.decay_groups(model, 0.1), lr=lr)
    schedule = optim.LambdaLR(optimizer, optim.SCHEDULES["cosine"](steps, min(20, steps // 4), final=0.1))
    windows = Windows(text.train, length)
    loader = Loader(windows.inputs, windows.targets, args.batch_size * args.length // length, seed=args.seed,
                    rank=world.rank, size=world.size)
    step = 0
    while step < steps:
        for batch in loader.epoch(step):
            training.train_step(model, optimizer, batch, loss_sum, world, seed=args.seed, step=step, units=length,
                                clip=1.0)
            schedule.step()
            step += 1
            if step == steps:
                break


def by_position(model, text, world, length):
    """Mean loss of held-back windows at each position, (length,); the ranks share the windows. Collective."""
    windows = Windows(text.validation, length)
    chosen = np.linspace(0, len(windows.inputs) - 1, EVAL_WINDOWS).astype(int)
    model.eval()
    mine = {}
    with mt.no_grad():
        for i in range(world.rank * EVAL_CHUNK, EVAL_WINDOWS, world.size * EVAL_CHUNK):
            rows = chosen[i:i + EVAL_CHUNK]
            losses = nn.cross_entropy(model(windows.inputs[rows]), windows.targets[rows], reduction="none")
            mine[i] = losses.numpy().sum(0, dtype=np.float64)
    model.train()
    sums = {i: s for part in world.all_gather_object(mine) for i, s in part.items()}
    return sum(sums[i] for i in sorted(sums)) / EVAL_WINDOWS


def table(args, found):
    """The quarters' means, as lines of text. found: {way: (losses right away, losses after tuning)}"""
    quarter = args.length * args.stretch // QUARTERS
    columns = "".join(f"{f'{i * quarter + 1}-{(i + 1) * quarter}':>9}" for i in range(QUARTERS))
    width = len(columns)
    lines = [f"learned with {args.length} characters, reads {args.length * args.stretch}: nats per character",
             f"{'':16}{'right away':>{width}}{f'after {args.tune} steps more':>{width + 4}}",
             f"{'':16}{columns}{'':4}{columns}"]
    for way, both in found.items():
        right_away, tuned = ("".join(f"{each.mean():9.3f}" for each in np.split(losses, QUARTERS)) for losses in both)
        lines.append(f"{way:16}{right_away}{'':4}{tuned}")
    return lines


def draw(args, found, path):
    """Both losses of each way by position, as means of sixteen positions."""
    length = args.length * args.stretch
    with drawn(path, (9, 4.2)) as figure:
        for i, (axes, title) in enumerate(zip(figure.subplots(1, 2, sharey=True), (
                "right away", f"after {args.tune} steps on {length} characters"), strict=True)):
            for way, both in found.items():
                parts = np.array_split(both[i], max(1, length // 16))
                ends = np.cumsum([len(part) for part in parts])
                middles = ends - [len(part) / 2 for part in parts]
                axes.plot(middles, [part.mean() for part in parts], label=way)
            axes.axvline(args.length, color="#999999", linewidth=1, linestyle=":")
            axes.set_title(title, fontsize=11)
            axes.set_xlabel("position in the window; dotted: as far as it has learned")
        figure.axes[0].set_ylabel("loss, nats per character")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be done."""
    with program.usage_errors("stretch.py"):
        world = comm.world()
        args = parse(argv)
        text = read_text(args.text or TEXTS)
        long = args.length * args.stretch
        for part in (text.train, text.validation):
            Windows(part, long)
        if args.batch_size < args.stretch * world.size:
            raise ValueError(f"--batch-size {args.batch_size} makes {args.batch_size // args.stretch} long windows, "
                             f"too few for {world.size} ranks: take {args.stretch * world.size} or more")
        program.make_folder(args.out, world)
    mt.manual_seed(args.seed)
    learned = gpt(text, args.length, nn.Rotary(BASE))
    train(args, learned, text, world, args.length, args.steps, lr=5e-3)
    state, found = learned.state_dict(), {}
    for way, rotary in ways(args.length, args.stretch).items():
        model = gpt(text, long, rotary)
        model.load_state_dict(state)
        right_away = by_position(model, text, world, long)
        train(args, model, text, world, long, args.tune, lr=1e-3)
        found[way] = right_away, by_position(model, text, world, long)
    if world.rank == 0:
        print("\n".join(table(args, found)), flush=True)
        draw(args, found, args.out / "stretch.png")
        print(f"by position: {args.out / 'stretch.png'}", flush=True)
    world.barrier()     # while rank 0 draws no other may end, which after a signal would end the job
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
