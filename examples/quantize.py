"""A digit classifier in numbers of few bits: what it still recognises, and how many bytes it takes.

    python examples/quantize.py
    python examples/quantize.py --data mnist --epochs 3 --hidden 300,100

Trains an MLP in float32, quantises it in every way there is, and trains it on with the roundings of 2 bits
(straight-through), of which a model that knows nothing of them forgets much.
"""

import sys

import minitorch_dist as mt
from minitorch_dist import data, divergence, nn, optim, program
from minitorch_dist.compress import Scheme, convert, describe, prepare_qat, quantize_model

RANGES = {program.AT_LEAST_1: ("epochs", "batch_size"), program.AT_LEAST_0: ("seed",), program.POSITIVE: ("lr",)}
PLAIN = {       # what it is -> how
    "weight-only, 8 bits": Scheme("weight-only", bits=8),
    "weight-only, 4 bits": Scheme("weight-only", bits=4),
    "weight-only, 2 bits": Scheme("weight-only", bits=2),
    "weight-only, 2 bits, least squared error": Scheme("weight-only", bits=2, weight_observer="mse"),
    "weight-only, 4 bits, per tensor": Scheme("weight-only", bits=4, per_channel=False),
    "dynamic, 8 bits": Scheme("dynamic"),
    "integers alone, 8 bits": Scheme("integer"),
    "integers alone, weights of 2 bits": Scheme("integer", bits=2),
}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="quantize.py", description=__doc__)
    p.add_argument("--data", choices=["auto", "mnist", "digits"], default="digits",
                   help="auto: MNIST where it can be had, else the digits that ship")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    p.add_argument("--epochs", type=int, help="passes over the training set (default: mnist 3, digits 20)")
    p.add_argument("--batch-size", type=int, default=64, help="samples per step")
    p.add_argument("--hidden", default="128,64", help="widths of the hidden layers, comma-separated")
    p.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD")
    p.add_argument("--seed", type=int, default=0, help="of initial values and order")
    args = p.parse_args(argv)
    p.check_ranges(args, RANGES)
    args.widths = p.widths(args.hidden)
    return args


def train(model, dataset, args, epochs):
    """Train the model, and return it in evaluation mode."""
    loader = data.Loader(dataset.train_images, dataset.train_labels, args.batch_size, seed=args.seed)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = optim.LambdaLR(optimizer, optim.cosine(epochs * len(loader), 0))
    with divergence.ends(), divergence.quiet():
        for epoch in range(epochs):
            for step, batch in enumerate(loader.epoch(epoch)):
                for shard in batch.shards:
                    loss = nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count
                    divergence.check(loss.item(), 1 + epoch * len(loader) + step, optimizer)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return model.eval()


def accuracy(model, images, labels):
    """Percent of the images that the model gets right."""
    with mt.no_grad():
        return 100.0 * float((model(images).numpy().argmax(axis=1) == labels).mean())


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("quantize.py")
    args = parse(argv)
    with program.usage_errors("quantize.py"):
        dataset = data.load(args.data, args.data_dir)
        mt.manual_seed(args.seed)
        model = nn.mlp(args.widths)
    epochs = args.epochs or dataset.default_epochs
    test = dataset.test_images, dataset.test_labels
    some = [dataset.train_images[:512]]       # to calibrate with
    model = train(model, dataset, args, epochs)
    before = sum(p.data.nbytes for p in model.parameters())

    print(f"{dataset.source}\n\n{'':<42}{'accuracy':>9}{'bytes':>11}{'of float32':>12}")

    def row(what, model, size):
        print(f"{what:<42}{accuracy(model, *test):>7.2f} %{size:>11,}{size / before:>12.3f}")
    row("float32", model, before)
    for what, scheme in PLAIN.items():
        small = quantize_model(model, scheme, some if scheme.kind == "integer" else None)
        row(what, small, describe(small).after)
    aware = convert(train(prepare_qat(model, bits=2), dataset, args, epochs))
    row("the same, trained on with the rounding", aware, describe(aware).after)
    print(f"\n{describe(aware)}")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
