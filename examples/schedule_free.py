"""Schedule-free AdamW: one training that may end anywhere, beside one training with a cosine for each length.

    python examples/schedule_free.py                    # half a minute; the digits soon fit by heart, MNIST doesn't
    mpirun -n 2 python examples/schedule_free.py        # ranks share the trainings among them
    python examples/schedule_free.py --out runs/free    # test loss over steps, a picture

A cosine is for one length: its loss is good at its end, and nowhere before. The schedule-free run is looked at on its
way, by the mean of its steps, x; y is where it takes gradients, and `constant` is AdamW at a rate that never falls. All
have the same warmup, batches and initial values; each way's rate is the best power of 2 for the longest run on MNIST.

Source: Defazio et al. 2024, "The road less scheduled", figure 1.
"""

import itertools
import math
import sys
from pathlib import Path

import minitorch_dist as mt
from minitorch_dist import comm, data, nn, optim, program
from minitorch_dist.backend import xp
from minitorch_dist.viz.figure import drawn

RANGES = {program.AT_LEAST_1: ("batch_size", "looks"), program.AT_LEAST_0: ("seed", "warmup"),
          program.POSITIVE: ("lr", "free_lr")}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="schedule_free.py", description=__doc__)
    p.add_argument("--lengths", default="125,250,500,1000,2000", help="steps of the trainings, comma-separated")
    p.add_argument("--lr", type=float, default=2.0 ** -8, help="greatest rate of AdamW's")
    p.add_argument("--free-lr", type=float, default=2.0 ** -7, help="rate of the schedule-free one's")
    p.add_argument("--warmup", type=int, default=25, help="steps over which they rise")
    p.add_argument("--hidden", default="64,64", help="widths of the hidden layers, comma-separated")
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="auto", help="which images")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--batch-size", type=int, default=64, help="samples per step")
    p.add_argument("--looks", type=int, default=60, help="of the picture's curves, over the longest training")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    p.add_argument("--out", type=Path, help="folder for a picture of the loss over steps")
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    args.widths, args.lengths = p.widths(args.hidden), sorted(set(p.widths(args.lengths, "--lengths")))
    if not args.lengths:
        p.error("--lengths: give one at least")
    return args


def jobs_of(args):
    """[(name, steps, greatest rate, schedule)] of all trainings, the longest first; None: schedule-free."""
    longest = args.lengths[-1]
    return [("schedule-free", longest, args.free_lr, None),
            ("constant", longest, args.lr, lambda steps: optim.constant(args.warmup)),
            *((f"cosine {n}", n, args.lr, lambda steps: optim.cosine(steps, min(args.warmup, steps - 1)))
              for n in reversed(args.lengths))]


def loader_of(args, dataset):
    """Whole batches, in the same order for each training."""
    return data.Loader(dataset.train_images, dataset.train_labels, args.batch_size, seed=args.seed, drop_last=True)


def trained(args, dataset, steps, lr, schedule):
    """{step: (test loss, test accuracy in percent, loss at y or None)} of one training, at the lengths and between."""
    mt.manual_seed(args.seed)
    model, seen = nn.mlp(args.widths), {}
    optimizer = optim.AdamW(model.parameters(), lr, weight_decay=0.0) if schedule else \
        optim.AdamWScheduleFree(model.parameters(), lr, warmup=args.warmup)
    rates = optim.LambdaLR(optimizer, schedule(steps)) if schedule else None
    looks = {*args.lengths, steps, *range(0, steps, max(1, args.lengths[-1] // args.looks))} - {0}
    loader = loader_of(args, dataset)
    batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
    with xp.errstate(over="ignore", invalid="ignore"):
        for step, batch in enumerate(itertools.islice(batches, steps), 1):
            optimizer.zero_grad()
            nn.cross_entropy(model(batch.inputs), batch.labels).backward()
            optimizer.step()
            if rates:
                rates.step()
            if step in looks and rates:
                seen[step] = *outcome(model, dataset), None
            elif step in looks:
                trained_at, _ = outcome(model, dataset)
                with optimizer.averaged():
                    seen[step] = *outcome(model, dataset), trained_at
    return seen


def outcome(model, dataset):
    """(mean loss, percent right) on the test images; inf where it has left all numbers."""
    with mt.no_grad():
        scores = model(dataset.test_images)
        loss = nn.cross_entropy(scores, dataset.test_labels).item()
    right = 100.0 * float((scores.numpy().argmax(axis=1) == dataset.test_labels).mean())
    return loss if math.isfinite(loss) else math.inf, right


def table(args, found):
    """Loss and accuracy as text: a line per length."""
    free, plain = found["schedule-free"], found["constant"]
    lines = [f"{'':>7}{'test loss':^48}{'test accuracy, %':^32}".rstrip(),
             f"{'steps':>7}{'cosine':>12}{'constant':>12}{'free, y':>12}{'free, x':>12}{'cosine':>16}{'free, x':>12}"]
    for n in args.lengths:
        cosine = found[f"cosine {n}"][n]
        losses = cosine[0], plain[n][0], free[n][2], free[n][0]
        lines.append(f"{n:7,}" + "".join(f"{loss:12.4f}" for loss in losses) + f"{cosine[1]:16.2f}{free[n][1]:12.2f}")
    return "\n".join(lines)


def picture(args, found, path):
    """Test loss over steps: a curve per cosine, and the one that has none."""
    with drawn(path, (8, 4.2)) as figure:
        axes = figure.subplots()
        for n in args.lengths:
            steps, points = zip(*sorted(found[f"cosine {n}"].items()), strict=True)
            axes.plot(steps, [loss for loss, *_ in points], color="0.6", lw=1.2,
                      label="AdamW, a cosine for each length" if n == args.lengths[0] else None)
            axes.plot(steps[-1], points[-1][0], "o", color="0.4", ms=5)
        for name, place, colour, label in (("constant", 0, "tab:orange", "AdamW, a constant rate"),
                                           ("schedule-free", 0, "tab:blue", "schedule-free, one run: x")):
            steps, points = zip(*sorted(found[name].items()), strict=True)
            axes.plot(steps, [point[place] for point in points], color=colour, lw=1.8, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("steps")
        axes.set_ylabel("test loss")
        axes.legend(frameon=False)


def main(argv=None):
    """The program; returns the exit status. SystemExit(2) for what can't be trained."""
    with program.usage_errors("schedule_free.py"):
        world = comm.world()
        args = parse(argv)
        dataset = data.load(args.data, args.data_dir, rank=world.rank, broadcast=world.broadcast_object)
        loader_of(args, dataset)        # what doesn't fit is said before anything is trained
        program.make_folder(args.out, world)
    jobs = jobs_of(args)
    if world.rank == 0:
        print(f"{dataset.source}\n{len(jobs)} trainings of up to {args.lengths[-1]:,} steps of {args.batch_size}; "
              f"rates {args.lr:g}, and {args.free_lr:g} without a schedule", flush=True)
    mine = {name: trained(args, dataset, *job) for name, *job in jobs[world.rank::world.size]}
    found = {name: seen for part in world.all_gather_object(mine) for name, seen in part.items()}
    if world.rank == 0:
        print(f"\n{table(args, found)}")
        if args.out:
            path = args.out / "schedule_free.png"
            picture(args, found, path)
            print(f"\ntest loss over steps: {path}")
    world.barrier()     # while rank 0 draws no other may end
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
