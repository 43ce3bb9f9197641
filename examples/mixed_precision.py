"""Training in 16 bits: which gradients float16 flushes to zero, what loss scaling saves, what bfloat16 does without it
and pays for it, and how much memory is left; and products in 8 and 4 bits.

    python examples/mixed_precision.py                  # the tables, and gradients.png
    python examples/mixed_precision.py --data mnist --hidden 512,512 --epochs 2

Trains an MLP on digits in float32; looks at the gradients of its first layer, one backward per scale, and in bfloat16;
then trains it again in float16, with and without GradScaler, in bfloat16, and with the products of all layers but the
last rounded to 8 and to 4 bits.

Digits are forgiving: gradients that 4 bits leave 40 % off train as well as float32's. What nvfp4 does for longer runs
of larger models, rounding gradients by chance and mixing tokens, changes accuracy here by no more than another --seed
does. A gradient that is itself rounded shows what chance is for: each time it is further off than to the nearest, but
the mean of several is nearer, where to the nearest they are all off alike.

Sources: Micikevicius et al. 2018, "Mixed precision training"; Kalamkar et al. 2019, "A study of BFLOAT16 for deep
learning training"; Micikevicius et al. 2022, "FP8 formats for deep learning"; NVIDIA 2025, "Pretraining large language
models with NVFP4".
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import data, divergence, ledger, nn, optim, program
from minitorch_dist.compress.formats import hadamard
from minitorch_dist.compress.low_precision import RECIPES, Operand, convert_to_low_precision_training
from minitorch_dist.viz.figure import drawn

RANGES = {program.AT_LEAST_1: ("epochs", "batch_size"), program.AT_LEAST_0: ("seed",), program.POSITIVE: ("lr",)}
SCALES = (0, 8, 16, 24, 32)         # powers of 2
FEW_BITS = {**RECIPES, "nvfp4, to the nearest": replace(RECIPES["nvfp4"], stochastic_rounding=False),
            "nvfp4, tokens not mixed": replace(RECIPES["nvfp4"], random_hadamard=False)}
DRAWS = 16
NORMAL, SMALLEST, LARGEST = -14, -24, 16        # 2^-14: float16's smallest normal number; it ends at 2^16


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="mixed_precision.py", description=__doc__)
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="digits",
                   help="auto: MNIST where it can be had, else the digits that ship")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--epochs", type=int, help="passes over the training set (default: mnist 3, digits 20)")
    p.add_argument("--batch-size", type=int, default=64, help="samples per step")
    p.add_argument("--hidden", default="256,128,64", help="widths of the hidden layers, comma-separated")
    p.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    p.add_argument("--out", type=Path, default=Path("runs/mixed_precision"), help="folder for the picture")
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    args.widths = p.widths(args.hidden)
    return args


def train(dataset, args, low, scaler, recipe=None):
    """(model, steps left out, bytes that the first step kept for backward) after training. low: 16 bits, or None;
    recipe: of products in few bits."""
    model = untrained(args, recipe)
    loader = data.Loader(dataset.train_images, dataset.train_labels, args.batch_size, seed=args.seed)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    epochs = args.epochs or (20 if dataset.name == "digits" else dataset.default_epochs)
    steps = epochs * len(loader)
    schedule = optim.LambdaLR(optimizer, optim.cosine(steps, steps // 10))
    left_out = kept = 0
    for epoch in range(epochs):
        for step, batch in enumerate(loader.epoch(epoch)):
            shard, = batch.shards
            optimizer.zero_grad()
            with ledger.record(memory=(first := epoch == step == 0)) as book, divergence.quiet():
                with mt.autocast(low or "float16", enabled=low is not None):
                    loss = nn.cross_entropy(model(shard.inputs), shard.labels)
                scaler.scale(loss).backward()
            divergence.check(loss.item(), 1 + epoch * len(loader) + step, optimizer, scaler)
            kept = book.peak["activation"] if first else kept
            scaler.step(optimizer)
            left_out += scaler.found_inf(optimizer)
            scaler.update()
            schedule.step()
    return model, left_out, kept


def untrained(args, recipe=None):
    """The model, with the products of all layers but the last by a recipe."""
    mt.manual_seed(args.seed)
    model = nn.mlp(args.widths)
    if recipe is not None:
        last = list(model.modules())[-1]
        convert_to_low_precision_training(model, recipe, lambda layer, path: layer is not last)
    return model


def accuracy(model, dataset):
    """Percent of the test images that the model gets right."""
    with mt.no_grad():
        return 100.0 * float((model(dataset.test_images).numpy().argmax(axis=1) == dataset.test_labels).mean())


def first_gradient(model, images, labels, power=0, low="float16"):
    """The gradient of the first layer's weight, flat: in 16 bits with the loss times 2^power, or in float32 (None)."""
    model.zero_grad()
    with mt.autocast(low or "float16", enabled=low is not None), np.errstate(all="ignore"):
        loss = nn.cross_entropy(model(images), labels)
        (loss * 2.0 ** power).backward()
    return next(model.parameters()).grad.numpy().ravel() / np.float32(2.0 ** power)


def row(low, power, found, exact):
    """(a line of the table, percent that became 0) of gradients found in 16 bits; exact: in float32, none of them 0."""
    kept = np.isfinite(found) & (found != 0)
    error = np.median(np.abs(found[kept] / exact[kept] - 1)) if kept.any() else np.nan
    with np.errstate(over="ignore"):
        ranged = 100 * np.mean((exact * np.float32(2.0 ** power)).astype(mt.backend.as_dtype(low)) == 0)
    lost = 100 * np.mean(found == 0)
    return f"{f'{low}, 2^{power}':<28}{lost:>12.1f} %{ranged:>12.1f} %{100 * np.mean(~np.isfinite(found)):>10.1f} %" \
           f"{100 * error:>12.2f} %", lost


def few_bits_row(args, what, recipe, batch, exact):
    """A line of the table: how far the first layer's gradient is off before training, made by a recipe's products; and
    the exact one, rounded as gradients are: once, and the mean of several times."""
    model = untrained(args, recipe)
    made, g = first_gradient(model, *batch, low=None), exact.reshape(next(model.parameters()).shape)
    g = hadamard(g) if recipe.random_hadamard else g
    random = np.random.default_rng(args.seed)
    rounded = [Operand(g, recipe.gradient, recipe.block, recipe.scale, chance=random.random(g.shape, np.float32)
                       if recipe.stochastic_rounding else None).rounded() for _ in range(DRAWS)]
    errors = made - exact, rounded[0] - g, sum(rounded) / DRAWS - g
    return f"{what:<28}" + "".join(f"{100 * np.linalg.norm(e) / np.linalg.norm(exact):>14.2f} %" for e in errors)


def draw(gradients, lost, path):
    """Exponents of gradients (float32, without zeros), as they are and times 2^16, beside float16's range."""
    exponents = np.log2(np.abs(gradients))
    with drawn(path, (8, 5.5)) as figure:
        for axes, power in zip(figure.subplots(2, 1, sharex=True, sharey=True), (0, 16), strict=True):
            axes.axvspan(SMALLEST, NORMAL, color="#f4a259", alpha=0.25, lw=0, label="subnormal: fewer than 11 bits")
            axes.axvspan(NORMAL, LARGEST, color="#5b8e7d", alpha=0.2, lw=0, label="float16")
            axes.hist(exponents + power, bins=np.arange(-60, LARGEST + 1), color="#2d4654")
            axes.set_title(f"{'times 2^16' if power else 'as they are'}: {lost[power]:.1f} % become 0", loc="left")
            axes.set_ylabel("gradients")
        axes.set_xlabel("log2 of a gradient of the first layer")
        axes.legend(loc="upper left")


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("mixed_precision.py")
    args = parse(argv)
    with program.usage_errors("mixed_precision.py"):
        dataset = data.load(args.data, args.data_dir)
        program.make_folder(args.out)
    print(f"{dataset.source}\n")
    ways = {        # what it is -> (its 16 bits, its scaler)
        "float32": (None, optim.GradScaler(enabled=False)),
        "float16, losses as they are": ("float16", optim.GradScaler(enabled=False)),
        "float16, GradScaler": ("float16", optim.GradScaler()),
        "bfloat16": ("bfloat16", optim.GradScaler(enabled=False)),
        **{what: (None, optim.GradScaler(enabled=False), recipe) for what, recipe in FEW_BITS.items()},
    }
    with divergence.ends():
        made = {what: train(dataset, args, *way) for what, way in ways.items()}

    model, batch = made["float32"][0], (dataset.train_images[:args.batch_size], dataset.train_labels[:args.batch_size])
    exact = first_gradient(model, *batch, low=None)
    there, exact = exact != 0, exact[exact != 0]
    print(f"gradients of the first layer after training, {exact.size:,} that aren't 0 in float32\n"
          f"{'loss times':<28}{'became 0':>14}{'too small':>14}{'inf or NaN':>12}{'median error':>14}")
    lines, lost = zip(*(row(low, power, first_gradient(model, *batch, power, low)[there], exact)
                        for low, power in (*(("float16", p) for p in SCALES), ("bfloat16", 0))), strict=True)
    print("\n".join(lines))

    early = first_gradient(untrained(args), *batch, low=None)
    print(f"\nerror of that gradient before training, in few bits\n"
          f"{'':<28}{'its products':>16}{'itself':>16}{f'mean of {DRAWS}':>16}")
    for what, recipe in FEW_BITS.items():
        print(few_bits_row(args, what, recipe, batch, early))

    print(f"\n{'':<28}{'accuracy':>14}{'left out':>12}{'activations':>16}{'cast weights':>16}")
    for what, (model, left_out, kept) in made.items():
        casts = 2 * sum(p.size for p in model.parameters()) * (ways[what][0] is not None)
        print(f"{what:<28}{accuracy(model, dataset):>12.2f} %{left_out:>12}{kept - casts:>10,} bytes{casts:>10,} bytes")
    draw(exact, dict(zip(SCALES, lost, strict=False)), args.out / "gradients.png")
    print(f"\nthe gradients' exponents: {args.out / 'gradients.png'}")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
