"""Distillation: what a student learns from a teacher's probabilities that labels don't say.

    python examples/distill.py
    python examples/distill.py --data mnist --few 1000 --teacher-steps 1500 --left-out 3

A teacher learns from all images. Then students of one hidden layer learn
  from few images, by their labels or by the teacher's probabilities at several temperatures;
  from all images but those of one digit, which they never see: the teacher's probabilities on the others say what it
  looks like. Its logit stays too low; a number that is added to it, chosen on the training images, makes up for that.

Source: Hinton, Vinyals & Dean 2015, "Distilling the knowledge in a neural network", sections 3 and 4.
"""

import sys
import time
from statistics import mean

import minitorch_dist as mt
from minitorch_dist import data, divergence, nn, optim, program
from minitorch_dist.backend import xp
from minitorch_dist.compress.distill import loss_sum

TEMPERATURES = (1, 4, 20)


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="distill.py", description=__doc__)
    p.add_argument("--data", choices=["digits", "mnist"], default="digits", help="which images")
    p.add_argument("--few", type=int, default=100, help="images of the first task")
    p.add_argument("--left-out", type=int, choices=range(10), default=3, metavar="DIGIT", help="of the second task")
    p.add_argument("--hidden", type=int, default=64, help="width of the students")
    p.add_argument("--teacher-steps", type=int, default=450, help="of 64 images; the teacher has twice 256 neurons")
    p.add_argument("--steps", type=int, default=300, help="of the students")
    p.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate")
    p.add_argument("--repeats", type=int, default=3, help="students of each kind; the tables show means")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("few", "hidden", "teacher_steps", "steps", "repeats"),
                          program.POSITIVE: ("lr",)})
    return args


def by_labels(model, shard):
    """The sum of cross-entropies."""
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def fit(model, images, labels, loss, steps, lr):
    """The model after so many steps; loss(model, batch) is a sum."""
    optimizer, loader = optim.Adam(model.parameters(), lr), data.Loader(images, labels, min(64, len(images)))
    batches = (batch for epoch in range(steps) for batch in loader.epoch(epoch))
    with divergence.ends(), divergence.quiet():
        for step, batch in zip(range(steps), batches, strict=False):
            optimizer.zero_grad()
            mean_loss = loss(model, batch) / batch.count
            divergence.check(mean_loss.item(), step + 1, optimizer)
            mean_loss.backward()
            optimizer.step()
    return model.eval()


def logits(model, images):
    """As an array."""
    with mt.no_grad():
        return model(images).numpy()


def accuracies(z, labels, digit):
    """(of all images, of those of one digit), in percent."""
    right = z.argmax(axis=1) == labels
    return 100 * float(right.mean()), 100 * float(right[labels == digit].mean())


def offset(z, labels, digit):
    """What is to be added to a digit's logit, for most images to be right: the least such of a grid."""
    grid = xp.arange(0, 15, 0.25)
    return grid[xp.argmax([((z + b * (xp.arange(10) == digit)).argmax(axis=1) == labels).mean() for b in grid])]


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("distill.py")
    args = parse(argv)
    begin = time.perf_counter()
    with program.usage_errors("distill.py"):
        d = data.load(args.data)
        if args.few > len(d.train_images):
            raise ValueError(f"--few {args.few}: there are {len(d.train_images):,} images to train on")
    x, y, digit = d.train_images, d.train_labels, args.left_out
    mt.manual_seed(0)
    teacher = fit(nn.mlp((256, 256), dropout=0.3), x, y, by_labels, args.teacher_steps, args.lr)
    losses = {"labels": by_labels} | {f"teacher, T = {t}": loss_sum(teacher, float(t)) for t in TEMPERATURES}

    def students(loss, rows):
        for seed in range(1, args.repeats + 1):
            mt.manual_seed(seed)
            yield fit(nn.mlp((args.hidden,)), x[rows], y[rows], loss, args.steps, args.lr)
    its, _ = accuracies(logits(teacher, d.test_images), d.test_labels, digit)
    print(f"{d.source}\nteacher: {its:.1f} % of the test images; students: means over {args.repeats}\n\n"
          f"{f'from {args.few} images':20} test accuracy")
    for name, loss in losses.items():
        found = mean(accuracies(logits(s, d.test_images), d.test_labels, digit)[0]
                     for s in students(loss, slice(args.few)))
        print(f"{name:20}{found:14.1f} %")
    print(f"\n{f'without any {digit}':20} test accuracy   of the {digit}s   with an offset   of the {digit}s")
    for name, loss in losses.items():
        rows = []
        for student in students(loss, y != digit):
            z, b = logits(student, d.test_images), offset(logits(student, x), y, digit)
            rows.append((*accuracies(z, d.test_labels, digit),
                         *accuracies(z + b * (xp.arange(10) == digit), d.test_labels, digit)))
        a, b, c, e = (mean(column) for column in zip(*rows, strict=True))
        print(f"{name:20}{a:14.1f} %{b:11.1f} %{c:15.1f} %{e:11.1f} %")
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
