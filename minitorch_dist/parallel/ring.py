"""Messages round a ring: what each rank has comes by all of them, in N - 1 messages to the next rank.

    for source, theirs in come_by(x, comm):     # x itself, that of rank r - 1, of r - 2, …
        work(theirs)                            # while the next one is on its way
"""

from ..backend import is_short, module_of, to_half


def pass_on(x, comm, into=None, ahead=1):
    """Post x to the next rank, or to one that is further `ahead`; a function that waits for what the rank as far behind
    has posted, and returns it (as `into`, an array like x, if given). x may not be written to before."""
    arriving = module_of(x).empty_like(x) if into is None else into
    works = (comm.irecv(arriving, (comm.rank - ahead) % comm.size), comm.isend(x, (comm.rank + ahead) % comm.size))

    def wait():
        for work in works:
            work.wait()
        return arriving
    return wait


def come_by(x, comm, into=None, steps=None):
    """Yield (rank, its x), one's own first; the next is on its way meanwhile.

    into: N - 1 arrays like x, for what arrives, in this order; by default each has memory of its own
    steps: of how many ranks, where not of all
    """
    steps = comm.size if steps is None else steps
    for step in range(steps):
        wait = pass_on(x, comm, None if into is None else into[step]) if step + 1 < steps else None
        yield (comm.rank - step) % comm.size, x
        if wait is not None:
            x = wait()


def came_by(x, others, comm):
    """What come_by has yielded, again: others is its `into`."""
    return [((comm.rank - step) % comm.size, theirs) for step, theirs in enumerate([x, *others])]


def as_was(total, dtype):
    """A sum in its terms' dtype: floats of 16 bits were added up in float32, all others in their own. What is too large
    becomes inf without a warning, for optim.GradScaler to see."""
    return to_half(total, dtype) if is_short(dtype) else total
