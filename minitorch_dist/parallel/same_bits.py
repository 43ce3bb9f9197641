"""Have the replicas still the same bits? Against silent data corruption, by a processor or a memory that is wrong.

In data parallelism all ranks hold the same parameters, to the last bit, for all apply the same sums of gradients. A bit
that turns over in one rank's parameters, optimizer state or sums makes it part from the others, and nobody notices:
the losses stay plausible. So every K steps the ranks compare a CRC-32 of what should be the same: 4 bytes each, and the
time to read the parameters once. A CRC-32 finds any one bit, and any within 32 neighbouring ones; of other differences
it misses one in 2³².

What it can't see: a gradient that a rank has worked out wrongly, before the sum. All ranks get the same wrong sum, and
stay alike. For this there is training.check_work: all ranks work out one and the same gradient, and compare its bits.

Sources: Dixit et al. 2021, "Silent Data Corruptions at Scale"; Hochschild et al. 2021, "Cores that don't count".
"""

import zlib
from collections import Counter

import numpy as np

from .data_parallel import DistributedDataParallel
from .fsdp.fully_sharded import FullySharded
from .wrapping import ReducingModule

FAULTY = ("A processor or a memory of theirs may be faulty. A checkpoint that was written when the check had passed is "
          "good: go on from it, without that machine.")
BETWEEN = (" Or, where these ranks share matrices, the parameter gets another gradient on each: parallelize_module "
           "says what may lie between a 'column' and a 'row'.")


class ReplicaError(RuntimeError):
    """Ranks that should hold the same bits don't."""


def check_same_bits(model, step=None, everyone=None):
    """ReplicaError on every rank unless all hold the same bits of what they hold alike: it names the ranks that differ
    from most, the first parameter in which they do, and by how much.

    model     a DistributedDataParallel: all parameters; those that parallelize_module has left whole also with the
              ranks that share the matrices, as those of a model that nobody has wrapped. Or a fully_shard model with
              `shard_over`: each piece, with those of the other copies (a piece that one rank alone holds has nothing to
              be compared with: ValueError where all are so). Or a list of these, a pipeline's stages on this rank.
              Between two steps. Not the buffers, which become rank 0's in each forward
    step      how many steps are done, to be told
    everyone  the Communicator of all ranks (default: the model's; a pipeline's stages don't know it)

    Collective. Each rank sends 4 bytes to each of the others that hold the same, and what is wrong only when something
    is.
    """
    groups = replicated(model)
    if not groups and everyone is None:
        raise ValueError("check_same_bits: every rank holds pieces of its own, of which there is no copy: give "
                         "fully_shard shard_over, for copies, or look at the losses")
    when = "" if step is None else f", found after step {step:,}"
    cut = any(sharing(part) for part in (model if isinstance(model, list) else [model]))
    check_same(everyone or getattr(model, "comm", None) or groups[0][0], groups, f"the replicas have parted{when}",
               FAULTY + BETWEEN * cut)


def check_same(everyone, groups, problem, advice=FAULTY):
    """ReplicaError on every rank, from the problem to the advice, unless the ranks of each group hold the same bits.
    groups: [(Communicator, [(name, tensor)])], those of this rank; everyone: the Communicator of all. Collective."""
    said = [(comm, named, _gathered(comm, crc32(tensor for _, tensor in named))) for comm, named in groups]
    parted = np.array([any(len(set(found)) > 1 for *_, found in said)], np.uint8)
    if [comm for comm, _ in groups] != [everyone]:
        everyone.all_reduce(parted, op="max")       # others may have parted
    if parted[0]:
        raise ReplicaError(_diagnosis(everyone, said, problem, advice))


def replicated(model):
    """[(Communicator, [(name, tensor)])]: what the ranks of each hold alike, on this rank's part."""
    groups = {}
    for part in model if isinstance(model, list) else [model]:
        wrapped, beside = isinstance(part, ReducingModule), sharing(part)
        if not (wrapped or beside):
            raise TypeError(f"check_same_bits: {type(part).__name__}; it takes a DistributedDataParallel, a "
                            "fully_shard model, or one that parallelize_module has cut")
        for name, p in (part.module if wrapped else part).named_parameters():
            comm, held = _copies(part, p) if wrapped else (None, p)
            if comm is not None:
                groups.setdefault(comm, []).append((name if held is p else f"{name}, a piece", held))
            for comm in beside:
                if p.leaf is None or p.leaf.part is None or not {*comm.world_ranks} <= {*p.leaf.part.comm.world_ranks}:
                    groups.setdefault(comm, []).append((name, p))
    return list(groups.items())


def sharing(model):
    """The Communicators of ranks that share the model's matrices, by parallelize_module, on the same samples. (Those of
    a fully_shard model's pieces needn't be cut alike, and aren't asked.)"""
    return [] if isinstance(model, FullySharded) else list(dict.fromkeys(
        m.comm for m in model.modules() if getattr(type(m), "is_part", False) and m.comm.size > 1
        and not hasattr(m, "divided_over")))


def _copies(model, p):
    """(who holds the same of a parameter of the module, or None: nobody; what this rank holds of it)"""
    if isinstance(model, DistributedDataParallel):
        return model.apart.get(id(p), (model.comm,))[0], p
    piece, grid = model.piece_of.get(id(p)), model.grid_of(p)
    return (grid.everyone, p) if piece is None else (grid.replicas, piece)


def crc32(tensors):
    """The CRC-32 of their values, one after the other."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(_bytes(tensor), found)
    return found


def _bytes(tensor):
    """A tensor's values on the host, as bytes."""
    return np.ascontiguousarray(tensor.cpu().numpy()).reshape(-1).view(np.uint8)


def _gathered(comm, number):
    """[number of each rank], of 4 bytes."""
    everyone = np.zeros(comm.size, np.uint32)
    comm.all_gather(everyone, np.array([number], np.uint32))
    return everyone.tolist()


# ---------------------------------------------------------------- what is wrong

def minority(found):
    """(the index of one of most that say the same, or None where there are no most; those that say something else)"""
    value, count = Counter(found).most_common(1)[0]
    if 2 * count <= len(found):
        return None, list(range(len(found)))
    return found.index(value), [i for i, other in enumerate(found) if other != value]


def _diagnosis(everyone, groups, problem, advice):
    """What to say, the same on all ranks. groups: [(comm, [(name, tensor)], [crc of each rank of comm])]"""
    mine = [_of_group(comm, named, found) for comm, named, found in groups if len(set(found)) > 1]
    lines = dict.fromkeys(text for texts in everyone.all_gather_object(mine) for text in texts)
    return "\n".join([f"{problem}:", *lines, advice])


def _of_group(comm, named, found):
    """Who has parted from whom, and in what; the same on all ranks of comm. Collective."""
    most, wrong = minority(found)
    sums = comm.all_gather_object([crc32([tensor]) for _, tensor in named])
    at = next(i for i in range(len(named)) if len({each[i] for each in sums}) > 1)
    name, tensor = named[at]
    reference = 0 if most is None else most
    theirs = tensor.cpu().numpy().copy()
    comm.broadcast(theirs, src=reference)
    reports = comm.all_gather_object(_differences(tensor.cpu().numpy(), theirs))
    ranks = [comm.world_ranks[i] for i in range(comm.size)]
    minor, major = ([rank for i, rank in enumerate(ranks) if (i in wrong) == is_wrong] for is_wrong in (True, False))
    who = f"{_ranks(minor)} against {_ranks(major)}" if major else (
        f"{_ranks(minor)} hold different bits, and there is no majority to tell which are right")
    return "\n".join([f"    {who}; first in {name!r}, {theirs.dtype}{list(theirs.shape)}",
                      *(f"        rank {rank} against rank {ranks[reference]}: {report}"
                        for rank, report in zip(ranks, reports, strict=True) if report)])


def _ranks(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _differences(mine, theirs):
    """How an array differs from another in its bits, in words; None where it doesn't."""
    mine, theirs = np.ascontiguousarray(mine), np.ascontiguousarray(theirs)
    unsigned = f"u{mine.dtype.itemsize}"
    differ = np.flatnonzero(mine.reshape(-1).view(unsigned) != theirs.reshape(-1).view(unsigned))
    if not differ.size:
        return None
    a, b = (x.reshape(-1)[differ].astype(np.float64) for x in (mine, theirs))
    with np.errstate(invalid="ignore"):
        distance = np.nan_to_num(abs(a - b), nan=np.inf)
    worst = int(distance.argmax())
    digits = 17 if mine.dtype.itemsize > 4 else 9      # by which neighbouring numbers differ
    first, at = (np.unravel_index(differ[i], mine.shape) for i in (0, worst))
    return (f"{differ.size:,} of {mine.size:,} elements, the first at {list(map(int, first))}; the greatest difference "
            f"is {distance[worst]:.3g}, at {list(map(int, at))}: {a[worst]:.{digits}g} instead of "
            f"{b[worst]:.{digits}g}")
