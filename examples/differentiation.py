"""What differentiation does, to look at: a linear program, and three pictures in runs/.

    python examples/differentiation.py
"""

import sys
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import ledger, nn, program

OUT = Path("runs")


def linear_program(rng):
    """1. Forward mode with unknown tangents leaves a linear program; read upwards it is reverse mode."""
    x = rng.standard_normal((4, 3))
    _, linear = mt.linearize(lambda w, b: mt.sum(mt.tanh(mt.matmul(x, w) + b), axis=1), np.ones((3, 2)), np.ones(2))
    print(f"{linear}\n\nTransposed:\n{linear.T}")


def tape(rng):
    """2. The tape of a small network."""
    mt.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    loss = nn.cross_entropy(model(mt.tensor(rng.standard_normal((5, 8)), dtype=np.float32)), np.array([0, 2, 1, 1, 0]))
    print("\n" + mt.viz.graph(loss, OUT / "graph.png", model))


def jacobian(rng):
    """3. A Jacobian, filled by columns and by rows."""
    a = rng.standard_normal((6, 4))
    columns, rows = mt.viz.jacobian_filling(lambda z: mt.sin(mt.matmul(a, z)), rng.standard_normal(4),
                                            OUT / "jacobian.png")
    print(f"\n{columns} JVPs or {rows} VJPs")


def layers(h, some):
    for w in some:
        h = mt.relu(mt.matmul(h, w))
    return h


def backward(start, weights, segments):
    """The ledger of a forward and a backward pass, in checkpointed segments or (0) without."""
    run = mt.checkpoint(layers) if segments else layers
    size = len(weights) // segments if segments else len(weights)
    with ledger.record(memory=True) as book:
        h = mt.tensor(start)
        for i in range(0, len(weights), size):
            h = run(h, weights[i:i + size])
        total = mt.sum(h)
        del h       # or the last activation would live on
        ledger.event("backward")
        total.backward()
        del total
    return book


def memory(rng):
    """4. The memory of 64 layers in each mode."""
    start = rng.standard_normal((100, 16))
    weights = [mt.tensor(rng.standard_normal((16, 16)) / 3, requires_grad=True) for _ in range(64)]
    with ledger.record(memory=True) as forward:
        mt.jvp(lambda h: layers(h, [w.detach() for w in weights]), (start,), (start,))
    books = {"reverse mode": backward(start, weights, 0), "reverse mode, 8 checkpoints": backward(start, weights, 8),
             "forward mode": forward}
    for label, peak in mt.viz.memory(books, OUT / "memory.png", unit=start.nbytes).items():
        print(f"{label}: at most {peak:.0f} activations")


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("differentiation.py")
    program.ArgumentParser(prog="differentiation.py", description=__doc__).parse_args(argv)
    with program.usage_errors("differentiation.py"):
        program.make_folder(OUT)
    rng = np.random.default_rng(0)
    for part in (linear_program, tape, jacobian, memory):
        part(rng)
    print(f"\nSee {OUT}/graph.png, {OUT}/jacobian.png and {OUT}/memory.png.")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
