"""What mt.compile makes of a function: the graph, its kernels, their C, and what that saves.

    python examples/compiler.py
    python examples/compiler.py --stage kernels         # captured, optimized, fused, kernels; "fused backward" …
    python examples/compiler.py --function softmax --rows 4096 --columns 1024
"""

import sys
import time

import minitorch_dist as mt
from minitorch_dist import ledger, program
from minitorch_dist.backend import stream, xp


def layer_norm(x, w, b):
    """Ordinary ops, as one would write it down."""
    centred = x - mt.mean(x, -1, keepdims=True)
    return centred / mt.sqrt(mt.mean(centred * centred, -1, keepdims=True) + 1e-5) * w + b


def softmax(x, w, b):
    """Of a scaled and shifted x."""
    e = mt.exp(x * w + b - mt.max(x * w + b, -1, keepdims=True))
    return e / mt.sum(e, -1, keepdims=True)


def gelu(x, w, b):
    """By tanh."""
    u = x * w + b
    return 0.5 * u * (1 + mt.tanh(0.7978845608 * (u + 0.044715 * u * u * u)))


FUNCTIONS = {f.__name__: f for f in (layer_norm, softmax, gelu)}
STAGES = ("captured", "optimized", "fused", "kernels", "fused backward", "kernels backward")


def parse(argv):
    """The command line."""
    p = program.ArgumentParser(prog="compiler.py", description=__doc__)
    p.add_argument("--function", choices=list(FUNCTIONS), default="layer_norm", help="what to compile")
    p.add_argument("--rows", type=int, default=4096, help="of the input")
    p.add_argument("--columns", type=int, default=1024, help="of the input")
    p.add_argument("--emit", choices=["c", "numpy"], help="who runs the kernels (default: C where there is a compiler)")
    p.add_argument("--stage", choices=STAGES, help="print this one alone")
    args = p.parse_args(argv)
    p.check_ranges(args, {program.AT_LEAST_1: ("rows", "columns")})
    return args


def best(function, times=10):
    """Milliseconds of the fastest of some calls."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return 1e3 * min(taken)


def passes(function, tensors, ct):
    """Forward and backward; the gradients."""
    for t in tensors:
        t.grad = None
    function(*tensors).backward(ct)
    return [t.grad.numpy() for t in tensors]


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("compiler.py")
    args = parse(argv)
    draw = stream("compiler", 0)
    function = FUNCTIONS[args.function]
    with program.usage_errors("compiler.py"):
        x, w, b, ct = (mt.tensor(draw.standard_normal(shape, xp.float32)) for shape in (
            (args.rows, args.columns), args.columns, args.columns, (args.rows, args.columns)))
        tensors = [t.requires_grad_() for t in (x, w, b)]
        compiled = mt.compile(function, emit=args.emit)
    first = best(lambda: passes(compiled, tensors, ct), 1)
    if args.stage:
        print(compiled.show(args.stage))
        return 0
    for stage in ("captured", "fused", "kernels", "fused backward"):
        print(f"--- {stage}\n{compiled.show(stage)}\n")
    wrong = max(abs(p - q).max() / (abs(p).max() or 1) for p, q in zip(     # of one column they are 0
        passes(function, tensors, ct), passes(compiled, tensors, ct), strict=True))
    with ledger.record(memory=True) as book:
        compiled(*tensors)
    with ledger.record(memory=True) as eager:
        function(*tensors)
    print(f"""--- what it saves, {args.rows} × {args.columns} float32
kernels of forward    {sum(book.launches.values())}
kept for backward     {book.peak['activation'] / 1e6:,.1f} MB, as ops {eager.peak['activation'] / 1e6:,.1f} MB
forward and backward  {best(lambda: passes(compiled, tensors, ct)):.2f} ms, as ops \
{best(lambda: passes(function, tensors, ct)):.2f} ms; the first time {first:.0f} ms
largest relative difference of a gradient {wrong:.1e}""")
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
