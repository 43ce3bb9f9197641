"""One transformer block, annotated in six ways: what each of its ops then does on the ranks, and what is sent.

    python examples/sharding.py                             # one rank: nothing to send
    mpirun -n 2 python examples/sharding.py
    mpirun -n 4 python examples/sharding.py --explain both  # of one way alone; --explain none: the table
    mpirun -n 4 python examples/sharding.py --explain zero --batch 48
    python examples/sharding.py --plan 4                    # the annotations that send the fewest bytes, on paper

Where the axes that two operands propose exclude each other, what is cheaper to send travels: with a large batch that
is the weights, and "zero" is ZeRO-3.

The block's code is the same in all of them (nn.TransformerBlock), and so is its result. An op's line shows how its
operands lie, how its result lies, and what this rank sent for it, by the ledger's count. The table at the end adds up
forward and backward.
"""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, program
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.parallel.sharding import annotate

TIME, DIM, HEADS = 8, 48, 12
MOST_RANKS = 1_000_000      # on paper: the mesh has a number for each


def block():
    """The same on all ranks."""
    mt.manual_seed(0)
    return nn.TransformerBlock(DIM, HEADS, causal=True, dtype=np.float64)


def ways(ranks):
    """{name: (what it is, the mesh, annotations of parameters, dims_mapping of the input)}."""
    megatron = annotate.megatron(block())
    both = {"dp": 2, "tp": -1} if ranks % 2 == 0 else {"dp": -1, "tp": 1}
    return {
        "megatron": ("heads and hidden features over tp", {"tp": -1}, megatron, [-1, -1, -1]),
        "sequence": ("as megatron, and the input's positions over tp", {"tp": -1}, megatron, [-1, "tp", -1]),
        "data": ("the batch over dp", {"dp": -1}, {}, ["dp", -1, -1]),
        "zero": ("the batch over dp, the matrices' rows too", {"dp": -1}, {
            "*.qkv.weight": ["dp", -1], "*.out.weight": ["dp", -1], "mlp.*.weight": ["dp", -1]}, ["dp", -1, -1]),
        "both": ("megatron over tp, the batch over dp", both, megatron, ["dp", -1, -1]),
        "fsdp": ("as both, and each part that a rank of tp has, over dp", both, {
            name: [(dims[0], "dp") if dims[0] != -1 else "dp", *dims[1:]] for name, dims in megatron.items()},
            ["dp", -1, -1]),
    }


def measured(mesh, annotations, dims, x, cotangent):
    """(forward's Page, the whole result, the ledger of backward, bytes of parameters that this rank holds)."""
    model = annotate.shard_parameters(block(), mesh, annotations)
    x = annotate.mesh_split(x, mesh, dims).requires_grad_()
    page = annotate.explain(lambda x: model(x).settle(), x)
    with ledger.record() as book:
        page.result.backward(cotangent)
    return page, lower(page.result.detach().full()), book, sum(p.data.nbytes for p in model.parameters())


def planned(ranks, batch):
    """The annotations of all matrices that send the fewest bytes, where the block takes and gives whole values."""
    mesh = annotate.paper_mesh(tp=ranks)
    x = annotate.replicate(np.zeros((batch, TIME, DIM)), mesh).requires_grad_()
    return annotate.plan(block(), mesh, "tp", x, out=[-1, -1, -1])


def main():
    """Run the ways one after another."""
    world, parser = comm.world(), program.ArgumentParser(prog="sharding.py", description=__doc__)
    parser.add_argument("--explain", nargs="*", default=["megatron", "data", "both"],
                        choices=["megatron", "sequence", "data", "zero", "both", "fsdp", "none"],
                        help="of which to print ops")
    parser.add_argument("--batch", type=int, default=12, help="sequences of 8 positions (default: 12)")
    parser.add_argument("--plan", type=int, metavar="RANKS", help="plan the block for so many ranks of tp, and end")
    args = parser.parse_args()
    if args.batch < 1:
        parser.error(f"--batch {args.batch}: must be at least 1")
    if args.plan is not None:
        if not 1 <= args.plan <= MOST_RANKS:
            parser.error(f"--plan {args.plan}: 1 rank or more, and at most {MOST_RANKS:,}")
        if world.rank == 0:
            print(planned(args.plan, args.batch))
        return
    if args.batch < world.size:
        parser.error(f"--batch {args.batch}: it is divided over the {world.size} ranks, and must be {world.size} or "
                     "more")
    x, cotangent = np.random.default_rng(1).standard_normal((2, args.batch, TIME, DIM))
    dense = lower(block()(mt.tensor(x)))
    rows = []
    for name, (what, axes, annotations, dims) in ways(world.size).items():
        mesh = comm.DeviceMesh(**axes)
        page, result, book, held = measured(mesh, annotations, dims, x, cotangent)
        rows.append(f"{name:10}{page.book.total_bytes_sent():12,}{book.total_bytes_sent():12,}{held:14,}"
                    f"{np.abs(result - dense).max():14.0e}")
        if world.rank == 0 and name in args.explain:
            print(f"{name}: {what}; {str(mesh).splitlines()[0]}\n\n{page}\n", flush=True)
    if world.rank == 0:
        print(f"bytes of rank 0 of {world.size}\n{'':10}{'forward':>12}{'backward':>12}{'parameters':>14}"
              f"{'off the dense':>14}\n" + "\n".join(rows))


if __name__ == "__main__":
    with program.reader_may_leave():
        main()
