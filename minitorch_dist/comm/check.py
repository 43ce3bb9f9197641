"""Arguments of the collectives, checked before anything is sent: the errors say which value broke which rule."""

import numpy as np

from ..backend import byte_range, device_of, is_array, on_host
from .mpi import INTERNAL_TAG
from .reduction import OPS, REDUCIBLE, is_power_of_two


def array(call, name, x, written=False):
    """x is a C-contiguous array of plain data, NumPy's or CuPy's, writable where the call writes to it."""
    if not is_array(x):
        raise TypeError(f"{call}: {name} must be a NumPy array (or CuPy's), got {type(x).__name__}" + _instead(name, x))
    if not x.flags.c_contiguous:
        raise ValueError(f"{call}: {name} has shape {x.shape} and strides {x.strides}, which isn't C-contiguous; "
                         f"pass np.ascontiguousarray({name}) and copy the result back where it is wanted")
    if x.dtype.hasobject:
        raise TypeError(f"{call}: {name} has dtype {x.dtype}, Python objects; use broadcast_object or gather_object")
    if written and on_host(x) and not x.flags.writeable:
        raise ValueError(f"{call}: {name} is read-only, and the result is written to it; pass {name}.copy()")


def _instead(name, x):
    """What to give in place of what is no array."""
    if isinstance(x, (bool, int, float)):
        return f": take {name} = np.array([{name}])"
    if hasattr(x, "numpy"):
        return (f": of a loss take np.array([{name}.item()]), of other tensors {name}.numpy(), which is written into; "
                "minitorch_dist.parallel.collectives has functions of tensors, with gradients")
    return ""


def reduction(call, x, op):
    """`op` exists and can be done on x's dtype."""
    if op not in OPS:
        raise ValueError(f"{call}: unknown op {op!r}; one of {', '.join(OPS)}")
    if x.dtype not in REDUCIBLE:
        raise TypeError(f"{call}: dtype {x.dtype} can't be reduced; cast to one of float32, float64, "
                        f"int8 to int64, uint8 to uint64 (native byte order)")
    if op == "mean" and x.dtype.kind != "f":
        raise TypeError(f"{call}: the mean of {x.dtype} isn't {x.dtype}; cast to float64, or take the sum")


def exact(call, op, size):
    """The balanced tree needs a power of two of ranks, and is a sum."""
    if op != "sum":
        raise ValueError(f"{call}: exact=True is for op='sum', got {op!r} (max and min are exact anyway; "
                         f"for a mean divide the exact sum)")
    if not is_power_of_two(size):
        raise ValueError(f"{call}: exact=True adds along a balanced binary tree over the ranks, which needs 1, 2, 4, "
                         f"8 … ranks; this communicator has {size}. Start a power of two, or drop exact")


def algorithm(algorithm, names):
    """`algorithm` is the name of an engine or an algorithm, or a function that can be one."""
    if not callable(algorithm) and algorithm not in names:
        raise ValueError(f"algorithm={algorithm!r} is unknown; one of {', '.join(names)}, or a function "
                         f"f(wire, x, combine), or folder/file.py:function (MINITORCH_COMM sets the default)")


def rank(call, name, value, size, own=None):
    """`value` is a rank of the communicator, and not the caller where `own` is given."""
    if not isinstance(value, (int, np.integer)) or not 0 <= value < size:
        raise ValueError(f"{call}: {name}={value!r} is no rank of this communicator; ranks are 0 to {size - 1}")
    if value == own:
        raise ValueError(f"{call}: {name}={value} is the calling rank itself; copy the array instead")


def of_bytes(call, name, x):
    """x is a 1-d array of bytes."""
    array(call, name, x)
    if x.dtype != np.uint8 or x.ndim != 1:
        raise TypeError(f"{call}: {name} is {x.dtype}{list(x.shape)}; it must be bytes, uint8 and 1-d: pass "
                        f"{name}.reshape(-1).view(np.uint8)")


def tag(call, value):
    """`value`, if it is a tag that users have."""
    if not isinstance(value, (int, np.integer)) or not 0 <= value < INTERNAL_TAG:
        raise ValueError(f"{call}: tag={value!r}; tags are 0 to {INTERNAL_TAG - 1}")
    return value


def parts(call, whole_name, whole, part_name, part, size, own):
    """`whole` has room for one `part` from each rank; the two may overlap only where `part` is the own share."""
    if whole.dtype != part.dtype:
        raise TypeError(f"{call}: {whole_name} is {whole.dtype} and {part_name} is {part.dtype}; they must be equal")
    if whole.size != size * part.size:
        raise ValueError(f"{call}: {whole_name} has {whole.size} elements (shape {whole.shape}), {part_name} has "
                         f"{part.size} (shape {part.shape}); on {size} ranks {whole_name} must have "
                         f"{size} × {part.size} = {size * part.size}")
    one_device(call, whole_name, whole, part_name, part)
    if np.may_share_memory(whole, part) and byte_range(whole)[0] + own * part.nbytes != byte_range(part)[0]:
        raise ValueError(f"{call}: {part_name} overlaps {whole_name}, but isn't this rank's part of it "
                         f"({whole_name}.reshape({size}, -1)[{own}])")


def one_device(call, a_name, a, b_name, b):
    """Both live on the same device."""
    if device_of(a) != device_of(b):
        raise ValueError(f"{call}: {a_name} lives on {device_of(a)} and {b_name} on {device_of(b)}; move one of them")


def exchange(out, x, send_counts, recv_counts, size, own):
    """The row counts of an all_to_all, as two lists: as given, or equal parts. That they fit those of the other ranks
    is for mismatch.Counts to check."""
    if out.dtype != x.dtype or out.shape[1:] != x.shape[1:] or x.ndim == 0 or out.ndim == 0:
        raise ValueError(f"all_to_all: x is {x.dtype}{list(x.shape)} and out {out.dtype}{list(out.shape)}; "
                         f"they must agree in dtype and in all axes but the first")
    one_device("all_to_all", "out", out, "x", x)
    if np.may_share_memory(out, x):
        raise ValueError("all_to_all: out and x overlap; give it an array of its own")
    send_counts = _row_counts("send_counts", send_counts, "x", x, size)
    recv_counts = _row_counts("recv_counts", recv_counts, "out", out, size)
    if send_counts[own] != recv_counts[own]:
        raise ValueError(f"all_to_all: of x's {len(x)} rows rank {own} sends itself {send_counts[own]}, but of out's "
                         f"{len(out)} rows {recv_counts[own]} are for them; the two must be equal")
    return send_counts, recv_counts


def _row_counts(counts_name, counts, name, rows, size):
    if counts is None:
        if len(rows) % size:
            raise ValueError(f"all_to_all: {name} has {len(rows)} rows, which {size} ranks can't share equally; "
                             f"pass {counts_name}")
        return [len(rows) // size] * size
    counts = [int(count) for count in counts]
    if len(counts) != size or min(counts) < 0 or sum(counts) != len(rows):
        raise ValueError(f"all_to_all: {counts_name}={counts} must be {size} numbers ≥ 0 with sum {len(rows)}, "
                         f"the rows of {name}")
    return counts
