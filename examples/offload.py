"""What waits for its turn goes to disk, or is computed again: activations, the optimizer's state, parameters. What each
way takes of memory, and of time.

    python examples/offload.py
    python examples/offload.py --layers 12 --dim 384 --batch 32 --folder /scratch
    python examples/offload.py --device cuda --to cpu       # from a GPU to the host's memory

A small GPT makes the same steps six times: as it is; with the blocks' activations computed again in backward, all, or
all but the products; with activations, the optimizer's state, or both on disk. The parameters afterwards have the same
bits; with --device cuda those that the GPU updates, and those that the host does where it has the optimizer's state:
the two round in their own ways. Memory is what the ledger counts, at its highest. Then a stack of 24 layers of 1024²
runs forward with its parameters in memory, and streamed from disk; memory there is what Python has allocated, of every
kind (on a GPU: the ledger's parameters). Last the loss of a large vocabulary, of all logits, and by tiles of them that
are made again in backward.
"""

import hashlib
import sys
import tempfile
import time
import tracemalloc
from contextlib import nullcontext
from statistics import median

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, ledger, nn, optim, program
from minitorch_dist.parallel.offload import offload_activations, offload_optimizer, stream_from_disk
from minitorch_dist.parallel.offload.spill import nameless_file

KINDS = ("parameter", "gradient", "optimizer", "activation", "buffer")
VOCABULARY, WARM_UP = 65, 2
PRODUCTS = "linear", "attention"        # ops that take long
# what is on disk; the ops that aren't computed again where the rest of a block is
WAYS = {"as it is": ((), None), "computed again": ((), ()), "but products": ((), PRODUCTS),
        "activations away": (("activations",), None), "optimizer away": (("optimizer",), None),
        "both away": (("activations", "optimizer"), None)}


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="offload.py", description=__doc__)
    p.add_argument("--layers", type=int, default=4, help="blocks of the GPT")
    p.add_argument("--dim", type=int, default=192, help="its width, a multiple of 4")
    p.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    p.add_argument("--batch", type=int, default=4, help="sequences of a step")
    p.add_argument("--steps", type=int, default=5, help=f"timed ones, after {WARM_UP}; the table shows the median")
    p.add_argument("--stack", type=int, default=24, help="layers of the stack that is streamed")
    p.add_argument("--width", type=int, default=1024, help="of its layers")
    p.add_argument("--vocabulary", type=int, default=50257, help="classes of the loss that is made by tiles")
    p.add_argument("--prefetch", type=int, default=1, help="so many arrays, or units, are read ahead")
    p.add_argument("--folder", help="where the disk is (default: the system's folder for temporary files)")
    p.add_argument("--to", choices=["disk", "cpu"], default="disk", help="where a step's things go; cpu: from a GPU")
    p.add_argument("--device", default="cpu", help="cpu, or cuda")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("layers", "dim", "length", "batch", "steps", "stack", "width",
                                               "vocabulary"),
                          program.AT_LEAST_0: ("prefetch",)})
    if args.to == "cpu" and args.device == "cpu":
        p.error("--to cpu: from the host's memory things can only go to disk; it is meant for --device cuda")
    return args


class Run:
    """A GPT's training, of which `away` is offloaded, and the blocks, but for the ops in `save`, computed again unless
    that is None: the seconds of each step, {kind: bytes at most}."""

    def __init__(self, args, away, save, to):
        mt.manual_seed(0)
        self.args, self.away, self.to, self.seconds = args, away, to, []
        self.model = nn.GPT(VOCABULARY, args.length, layers=args.layers, heads=4, dim=args.dim).to(args.device)
        if save is not None:
            for block in self.model.blocks:
                block.forward = mt.checkpoint(block.forward, save=save)
        self.optimizer = optim.AdamW(self.model.parameters(), 1e-3)
        if "optimizer" in away:
            offload_optimizer(self.optimizer, to)

    def step(self, number):
        """One step; the last before those that are timed is counted, which takes time."""
        args = self.args
        tokens = backend.stream("tokens", number).integers(0, VOCABULARY, (args.batch, args.length + 1))
        tokens = backend.to(tokens, args.device)
        with ledger.record(memory=True) if number == WARM_UP - 1 else nullcontext() as book:
            begin = time.perf_counter()
            with offload_activations(self.model, self.to, prefetch=args.prefetch) if "activations" in self.away \
                    else nullcontext():
                logits = self.model(tokens[:, :-1])
                loss = nn.cross_entropy(logits.reshape((-1, VOCABULARY)), tokens[:, 1:].reshape(-1))
                del logits      # else the program has it
            loss.backward()
            self.optimizer.step()
            loss.item()
            self.seconds.append(time.perf_counter() - begin)
        if book:
            self.peak = book.peak
        self.optimizer.zero_grad()

    def digest(self):
        """Of the parameters."""
        return hashlib.sha256(b"".join(a.tobytes() for a in self.model.state_dict().values())).hexdigest()


def training_table(args, folder):
    """Lines of text: every way beside the plain one. They take turns, step by step, so that what slows the machine down
    slows down all."""
    runs = {way: Run(args, *what, "cpu" if args.to == "cpu" else folder) for way, what in WAYS.items()}
    for number in range(WARM_UP + args.steps):
        for run in runs.values():
            run.step(number)
    rows = [f"{way:16}" + "".join(f"{run.peak[kind] / 1e6:12.2f}" for kind in KINDS)
            + f"{1e3 * median(run.seconds[WARM_UP:]):10.0f}" for way, run in runs.items()]
    digests = {}        # whose update it is -> the digests after it
    for run in runs.values():
        where = "" if args.device == "cpu" else ", updated on the host," if "optimizer" in run.away else \
            ", updated on the GPU,"
        digests.setdefault(f"parameters{where}", set()).add(run.digest())
    return [f"{'':16}" + "".join(f"{kind:>12}" for kind in KINDS) + "   ms/step", *rows,
            *(verdict(what, found) for what, found in digests.items())]


def verdict(what, digests):
    """Whether all ways have come to the same."""
    return f"the same {what} to the last bit" if len(digests) == 1 else f"{len(digests)} DIFFERENT {what}"


def forward(args, model):
    """(seconds, MiB at most, hash of the output) of a forward of the stack."""
    x = mt.tensor(backend.stream("x").standard_normal((16, args.width)).astype("f4"), device=args.device)
    seconds = []
    with mt.no_grad():
        for _ in range(3):
            begin = time.perf_counter()
            y = model(x).cpu().numpy()
            seconds.append(time.perf_counter() - begin)
        _, before = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with ledger.record(memory=True) as book:
            for p in model.parameters():
                ledger.keep(p.data, "parameter")
            model(x)
        peak = book.peak["parameter"] if args.device != "cpu" else tracemalloc.get_traced_memory()[1]
    return median(seconds), peak / 2 ** 20, hashlib.sha256(y.tobytes()).hexdigest()


def streaming_table(args, folder):
    """Lines of text: the stack in memory, and streamed."""
    size = 4 * args.stack * args.width * (args.width + 1)
    lines = [f"{args.stack} layers of {args.width}²: {size / 2 ** 20:.1f} MiB of parameters",
             f"{'parameters':24}{'MiB at most':>12}{'ms/forward':>12}"]
    digests = set()
    for prefetch in (None, *sorted({0, args.prefetch})):
        mt.manual_seed(0)
        tracemalloc.start()
        model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.stack))).to(args.device)
        if prefetch is not None:
            stream_from_disk(model, folder, prefetch)
        seconds, mebibytes, digest = forward(args, model)
        tracemalloc.stop()
        digests.add(digest)
        name = "in memory" if prefetch is None else f"streamed, {prefetch} ahead"
        lines.append(f"{name:24}{mebibytes:12.1f}{1e3 * seconds:12.1f}")
    return [*lines, verdict("outputs", digests)]


LOSSES = {"of all logits": lambda x, weight, labels: nn.cross_entropy(mt.linear(x, weight), labels),
          "by tiles": nn.linear_cross_entropy}


def loss_table(args):
    """Lines of text: the loss of an output layer of many classes, both ways."""
    tokens, stream = args.batch * args.length, backend.stream("loss")
    arrays = [stream.standard_normal((n, args.dim)).astype("f4") / args.dim ** 0.5 for n in (tokens, args.vocabulary)]
    labels = backend.to(stream.integers(0, args.vocabulary, tokens), args.device)
    lines, found = [f"the loss of {tokens:,} tokens of {args.vocabulary:,} classes; MB that are kept for backward",
                    f"{'loss':16}{'activation':>12}{'ms':>10}"], []
    for way, loss_of in LOSSES.items():
        seconds = []
        for _ in range(2):
            leaves = [mt.tensor(a, device=args.device, requires_grad=True) for a in arrays]
            begin = time.perf_counter()
            with ledger.record(memory=True) as book:
                loss = loss_of(*leaves, labels)
                kept = book.live["activation"]
            loss.backward()
            loss.item()
            seconds.append(time.perf_counter() - begin)
        found.append([loss.item(), *(leaf.grad.cpu().numpy() for leaf in leaves)])
        lines.append(f"{way:16}{kept / 1e6:12.2f}{1e3 * min(seconds):10.0f}")
    apart = max(abs(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in zip(*found, strict=True))
    return [*lines, f"loss and gradients differ by {apart:.0e} of their norms"]


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("offload.py")
    args = parse(argv)
    with program.usage_errors("offload.py"):
        nameless_file(args.folder).close()      # what is wrong with the folder is told with its own name
    with program.usage_errors("offload.py"), tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.device = program.take_device(args.device)
        mt.manual_seed(0)
        with nn.without_values():
            gpt = nn.GPT(VOCABULARY, args.length, layers=args.layers, heads=4, dim=args.dim)
        print(f"a GPT of {sum(p.size for p in gpt.parameters()):,} parameters in float32, AdamW, {args.batch} "
              f"sequences of {args.length} tokens; MB in memory at most")
        print("\n".join([*training_table(args, folder), "", *streaming_table(args, folder), "", *loss_table(args)]))
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
