"""Model soups: the weights of models that were fine-tuned from one start can be averaged, those of others can't.

    python examples/soup.py
    python examples/soup.py --data mnist --samples 12000 --start 300 --steps 400

A network is trained for a while; from there several go on, each with its own order of images and learning rate. Their
average, the greedy soup (of those that help, on images that none was trained on), and their ensemble, which asks all of
them. Then the same with networks that have each started from initial values of their own. Last, an average over the
steps of one training. (Of the digits that ship 360 test: a percent is four of them.)

Sources: Wortsman et al. 2022, "Model soups"; Izmailov et al. 2018, "Averaging weights leads to wider optima".
"""

import sys
import time
from statistics import mean

import minitorch_dist as mt
from minitorch_dist import data, nn, optim, program
from minitorch_dist.backend import stream_key
from minitorch_dist.compress import soup

RATES = (0.002, 0.003, 0.004, 0.005)        # high, so that there is something to average away


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="soup.py", description=__doc__)
    p.add_argument("--data", choices=["digits", "mnist"], default="digits", help="which images")
    p.add_argument("--samples", type=int, help="of the training images, a fifth of which validates (default: all)")
    p.add_argument("--hidden", default="64", help="widths of the hidden layers")
    p.add_argument("--models", type=int, default=8, help="in a soup")
    p.add_argument("--start", type=int, default=100, help="steps of the common start")
    p.add_argument("--steps", type=int, default=100, help="of each model after that")
    p.add_argument("--repeats", type=int, default=3, help="the whole with so many seeds; the tables show means")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("samples", "models", "start", "steps", "repeats")})
    args.hidden = p.widths(args.hidden)
    return args


def train(model, images, labels, steps, lr, seed, after_step=lambda: None):
    """The model after so many steps of Adam."""
    optimizer, loader = optim.Adam(model.parameters(), lr), data.Loader(images, labels, 64, seed=seed)
    batches = (batch for epoch in range(steps) for batch in loader.epoch(epoch))
    for _, batch in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        (nn.cross_entropy(model(batch.inputs), batch.labels, reduction="sum") / batch.count).backward()
        optimizer.step()
        after_step()
    return model


def probabilities(model, images):
    """As an array."""
    with mt.no_grad():
        return mt.softmax(model(images)).numpy()


def percent(p, labels):
    """How many are right."""
    return 100 * float((p.argmax(axis=1) == labels).mean())


def outcomes(states, model, validation, test):
    """What becomes of some models together: ({what: test accuracy}, their greedy Soup)."""
    def accuracy(state, images, labels):
        model.load_state_dict(state)
        return percent(probabilities(model, images), labels)
    greedy = soup.greedy_soup(states, lambda state: accuracy(state, *validation))
    alone, total = [accuracy(state, *test) for state in states], 0
    for state in states:
        model.load_state_dict(state)
        total = total + probabilities(model, test[0])
    best = max(range(len(states)), key=lambda i: greedy.scores[i])
    return {"one of them, mean": mean(alone), "best in validation": alone[best],
            "uniform soup": accuracy(soup.uniform_soup(states), *test), "greedy soup": accuracy(greedy.state, *test),
            "ensemble (all at work)": percent(total, test[1])}, greedy


def along_one(model, x, y, test, steps):
    """{what: test accuracy} at the end of one training at the highest rate."""
    average = soup.ExponentialMovingAverage(model, 0.98)
    train(model, x, y, steps, RATES[-1], 0, average.update)
    found = {"last step": percent(probabilities(model, test[0]), test[1])}
    with average.applied():
        return found | {"moving average, 0.98": percent(probabilities(model, test[0]), test[1])}


def show(title, rows):
    """Print the means of dicts of one kind."""
    print(f"\n{title}")
    for name in rows[0]:
        print(f"  {name:24}{mean(row[name] for row in rows):6.2f} %")


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("soup.py")
    args = parse(argv)
    begin = time.perf_counter()
    with program.usage_errors("soup.py"):
        d = data.load(args.data)
        if args.samples == 1:
            raise ValueError("--samples 1: at least 2, a fifth of which validates")
    x, y = d.train_images[:args.samples], d.train_labels[:args.samples]
    cut, steps, one_start, own_starts, along = len(x) * 4 // 5, args.start + args.steps, [], [], []
    (x, y), validation, test = (x[:cut], y[:cut]), (x[cut:], y[cut:]), (d.test_images, d.test_labels)

    def new(*seed):
        mt.manual_seed(stream_key(*seed))
        return nn.mlp(args.hidden)
    for repeat in range(args.repeats):
        first = train(new(repeat), x, y, args.start, 0.001, repeat).state_dict()
        tuned, others = [], []
        for i in range(args.models):
            one = new(repeat)
            one.load_state_dict(first)
            tuned.append(train(one, x, y, args.steps, RATES[i % len(RATES)], i).state_dict())
            others.append(train(new(repeat, i), x, y, steps, 0.001, i).state_dict())
        row, greedy = outcomes(tuned, one, validation, test)
        one_start.append(row)
        own_starts.append(outcomes(others, one, validation, test)[0])
        along.append(along_one(new(repeat), x, y, test, steps))
    print(f"{d.source}\n{len(x):,} images train, {len(validation[0]):,} validate; test accuracy, means over "
          f"{args.repeats} repeat{'s' * (args.repeats > 1)}")
    show(f"{args.models} models from one start", one_start)
    show(f"{args.models} models from starts of their own", own_starts)
    show(f"one training at rate {RATES[-1]}", along)
    print(f"\nthe last greedy soup (accuracy in validation)\n{greedy}\n\n{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
