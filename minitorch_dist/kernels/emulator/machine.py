"""Runs a Program: all lanes of many programs at once, one instruction after the other, in NumPy.

A register is an array with an element per lane, or one number where all lanes have the same. Lanes that part at a
branch go on separately: those at the earliest instruction first, until they meet again. Lanes at a barrier wait for
their program's others, and those at an instruction of the whole warp for its others, which may come from further down.
"""

from dataclasses import replace

import numpy as np

from . import arithmetic
from .arithmetic import TYPES, U32, UNSIGNED
from .carries import carrying
from .lanes import SPECIAL, EmulationError, Lanes, Unknown, reader, whole_warps, writer
from .loads_and_stores import atomic, copy, load, parameter, store
from .memory import LOCAL_BASE, SHARED_BASE, Fault, LocalMemory, SharedMemory, aligned
from .ptx import ENDS, Address, names, stem
from .together import group_multiply, matrices, multiply, reduce, shuffle, vote

AT_ONCE = 4096          # lanes of a batch, about
MOST = 1_000_000        # blocks of instructions that a batch runs
OF_WARPS = {"ldmatrix", "stmatrix", "mma", "wgmma", "shfl", "redux", "vote"}       # instructions of whole warps
NO_WORK = {"fence", "membar", "griddepcontrol"}     # order of memory: here every access has its place in one order


def lane_by_lane(one):
    """An instruction of arithmetic.operation, or None."""
    if one.parts[0] == "mov" and any(isinstance(o, tuple) for o in one.operands):
        return packing(one)
    if one.parts[0] == "setp" and one.parts[-1] in ("f16x2", "bf16x2"):
        return compared_by_halves(one)
    if "cc" in one.parts:
        return carrying(one) if one.parts[0] in ("add", "sub", "mad") else None
    found = arithmetic.operation(one.parts)
    if found is None or "|" in one.operands[0]:
        return None
    types, function = found
    if len(types) != len(one.operands) - 1:
        return None
    put, fit = writer(one.operands[0]), fitting(one)
    read = [reader(operand, dtype) for operand, dtype in zip(one.operands[1:], types, strict=True)]

    def run(state, mask):
        put(state, fit(np.asarray(function(*(get(state) for get in read)))[()]), mask)
    return run


def compared_by_halves(one):
    """setp of two numbers in a register: p|q, where p is of the lower ones."""
    p, _, q = one.operands[0].partition("|")
    found = arithmetic.operation((*one.parts[:-1], arithmetic.PAIRS[one.parts[-1]][0]))
    if found is None or not q or not len(one.operands) - 1 == len(found[0]) == 2:
        return None
    (dtype, _), test = found
    read, puts = [reader(operand, U32) for operand in one.operands[1:]], [(0, writer(p)), (16, writer(q))]

    def run(state, mask):
        values = [get(state) for get in read]
        for first, put in puts:
            halves = [(value >> U32.type(first)).astype(np.uint16).view(dtype) for value in values]
            put(state, np.asarray(test(*halves))[()], mask)
    return run


def fitting(one):
    """What makes the result of a cvt, an integer, as wide as the register it goes to."""
    to = TYPES.get(one.parts[-2]) if one.parts[0] == "cvt" else None
    if to is None or to.kind not in "iu" or (one.bytes or 0) <= to.itemsize:
        return lambda value: value
    wide = np.dtype(f"{to.kind}{one.bytes}")
    return lambda value: value.astype(wide)


def packing(one):
    """mov between a register and several narrower ones."""
    whole = TYPES.get(one.parts[1])
    if whole is None:
        return None
    target, source = one.operands
    if isinstance(source, tuple):
        put, part = writer(target), UNSIGNED[whole.itemsize // len(source)]
        read = [reader(operand, part) for operand in source]

        def pack(state, mask):
            value = UNSIGNED[whole.itemsize].type(0)
            for i, get in enumerate(read):
                value = value | get(state).astype(value.dtype) << value.dtype.type(8 * part.itemsize * i)
            put(state, value, mask)
        return pack
    get, part = reader(source, UNSIGNED[whole.itemsize]), UNSIGNED[whole.itemsize // len(target)]
    puts = [writer(operand) for operand in target]

    def unpack(state, mask):
        value = get(state)
        for i, put in enumerate(puts):
            put(state, (value >> value.dtype.type(8 * part.itemsize * i)).astype(part), mask)
    return unpack


MAKERS = {"ld": load, "ldu": load, "st": store, "atom": atomic, "red": atomic, "cp": copy, "ldmatrix": matrices,
          "stmatrix": matrices, "mma": multiply, "wgmma": group_multiply, "shfl": shuffle, "redux": reduce,
          "vote": vote, "addc": carrying, "subc": carrying, "madc": carrying}


def unknown(what):
    """In an instruction's place: Unknown when a lane comes to it. A sine has some for large numbers alone."""
    def run(state, mask):
        raise Unknown(f"the emulator doesn't know {what}")
    return run


def placed(operand, addresses):
    """An operand with the addresses of variables in place of their names."""
    if isinstance(operand, tuple):
        return tuple(placed(part, addresses) for part in operand)
    if isinstance(operand, Address) and operand.base in addresses:
        return Address(None, addresses[operand.base] + operand.offset)
    return addresses.get(operand, operand)


def made(one, program, addresses):
    """(state, mask) -> None: what an Instruction of a Program does. addresses: {variable: where it is}."""
    one = replace(one, operands=tuple(placed(operand, addresses) for operand in one.operands))
    name, of = one.parts[0], names(one.operands)
    if name in NO_WORK or one.parts[:3] == ("bar", "warp", "sync"):
        return lambda state, mask: None
    strangers = [word for word in of if not (
        word in SPECIAL or {word, stem(word)} & program.registers or word in program.parameters)]
    if strangers:
        run = unknown(f"{strangers[0]} in the PTX instruction {one.text}")
    elif of_kernel := [word for word in of if word in program.parameters]:
        run = parameter(one, program.size(of_kernel[0]))
    elif name in MAKERS:
        run = MAKERS[name](one)
    else:
        run = lane_by_lane(one)
    if run is None:
        run = unknown(f"the PTX instruction {one.text}")
    if one.guard is None:
        return run
    read, negated = reader(one.guard[0], TYPES["pred"]), one.guard[1]
    flops = arithmetic.flops(one.parts)

    def guarded(state, mask):
        wanted = read(state) != negated
        mask = state.spread(wanted) if mask is None else mask & wanted
        if mask.any():
            state.counts.flops["cuda"] += flops * int(np.count_nonzero(mask))
            run(state, None if mask.all() else mask)
    return guarded


class Code:
    """A Program made runnable: per block its instructions, what they cost, and how it ends.

    tables   {name: array} of what its text keeps in memory; it is there as long as the Code
    of_warps per block whether some of its instructions are of whole warps
    """

    def __init__(self, program):
        self.program = program
        self.tables = {name: table(one) for name, one in program.variables.items() if one.space in ("global", "const")}
        bases = {"shared": SHARED_BASE, "local": LOCAL_BASE}
        self.addresses = {name: int(array.ctypes.data) for name, array in self.tables.items()} | {
            name: bases[program.variables[name].space] + offset for name, offset in program.offsets.items()}
        self.blocks = [self.block(first, end) for first, end in program.blocks]
        self.of_warps = [any(one.parts[0] in OF_WARPS for one in program.instructions[first:end])
                         for first, end in program.blocks]

    def block(self, first, end):
        """(instructions that run, places, floating-point operations per lane of those without a guard, the last one if
        it ends a block)."""
        code = self.program.instructions[first:end]
        last = code[-1] if code[-1].parts[0] in ENDS else None
        if last is not None and last.parts[:2] == ("bar", "warp"):
            last = None
        body = code[:-1] if last else code
        flops = sum(arithmetic.flops(one.parts) for one in body if one.guard is None)
        runnable = [(made(one, self.program, self.addresses), one) for one in body]
        return runnable, [one.place for one in code], flops, last


def table(one):
    """The array of a Variable, that nobody writes to if it is constant."""
    data = one.data or bytes(one.size)
    array = aligned(np.frombuffer(data, np.uint8))
    array.flags.writeable = one.space != "const"
    return array


def run(code, grid, threads, parameters, memory, shared_size, counts):
    """Run all programs of a grid. counts: where costs are added.

    threads      per program: a number, or those of each dimension
    parameters   {name: NumPy number, or the bytes of a structure as an array of uint8}
    shared_size  bytes of shared memory per program besides those that the text asks for

    EmulationError, naming the instruction's line, program and thread, where the kernel does what it must not.
    """
    block = tuple(np.atleast_1d(threads).tolist())
    programs, each = int(np.prod(grid)), whole_warps(int(np.prod(block)))
    per_batch = max(1, AT_ONCE // each)
    memory.include(code.tables)
    for first in range(0, programs, per_batch):
        count = min(per_batch, programs - first)
        shared = SharedMemory(count, code.program.shared + shared_size, each // 32)
        local = LocalMemory(count * each, code.program.local)
        state = Lanes(code.program, first, count, block, grid, parameters, memory, shared, local, counts)
        with np.errstate(all="ignore"):     # a GPU is silent too
            batch(code, state)


def batch(code, state):
    """Run one batch of programs to its end."""
    at = np.zeros(state.size, np.intp)          # the block that each lane is to run next
    waiting = np.zeros(state.size, bool)
    over = len(code.blocks)
    at[state.absent] = over
    for _ in range(MOST):
        ready = ~waiting & (at < over)
        if not ready.any():     # nobody can be waiting: who has ended counts as having come to every barrier
            return
        block, together = earliest(code, at, ready)
        mask = None if together.all() else together
        last = execute(code, state, block, mask)
        at[together] = block + 1
        if last is None:
            continue
        try:
            finish(code, state, last, block, mask, together, at, waiting, over)
        except Fault as fault:
            raise error(code, state, last, fault) from None
    raise EmulationError(f"kernel {code.program.name}, {state.where(np.flatnonzero(together)[0])}: still runs after "
                         f"{MOST:,} blocks of instructions")


def earliest(code, at, ready):
    """(the block to run next, the lanes that are at it)."""
    block = int(at[ready].min())
    together = ready & (at == block)
    if code.of_warps[block] and in_parts(together, ready):      # a compiler may have put what leads here behind it
        for later in np.unique(at[ready])[1:].tolist():
            others = ready & (at == later)
            if not (code.of_warps[later] and in_parts(others, ready)):
                return later, others
    return block, together


def in_parts(together, ready):
    """Whether these are a part of some warp whose others can go on, too."""
    others = (ready & ~together).reshape(-1, 32).any(1)
    return bool((together.reshape(-1, 32).any(1) & others).any())


def execute(code, state, block, mask):
    """Run a block's instructions on the lanes of a mask; returns the one that ends it."""
    body, places, flops, last = code.blocks[block]
    lanes = state.size if mask is None else int(np.count_nonzero(mask))
    warps_active = state.size // 32 if mask is None else int(mask.reshape(-1, 32).any(1).sum())
    whole = warps_active if mask is None else int((mask | state.absent).reshape(-1, 32).all(1).sum())
    counts = state.counts
    counts.flops["cuda"] += flops * lanes
    for place in places:
        counts.instructions[place] += warps_active
    counts.diverged += warps_active - whole
    for one, instruction in body:
        try:
            one(state, mask)
        except Fault as fault:
            raise error(code, state, instruction, fault) from None
    return last


def error(code, state, instruction, fault):
    lane, words = fault.args
    file, line = instruction.place
    return EmulationError(f"kernel {code.program.name}, {file.rpartition('/')[2]}:{line}, {state.where(lane)}: {words} "
                          f"({instruction.text})")


def finish(code, state, last, block, mask, together, at, waiting, over):
    """What the instruction at a block's end does with the lanes that ran it."""
    taking = together
    if last.guard is not None:
        wanted = state.spread(reader(last.guard[0], TYPES["pred"])(state) != last.guard[1])
        taking = together & wanted
    name = last.parts[0]
    if name == "bra":
        at[taking] = code.program.labels[last.operands[0]]
    elif name in ("ret", "exit"):
        if state.copies:
            mine = [lanes[taking[lanes]] for lanes, *_ in state.copies]
            for lanes in mine:
                if len(lanes):
                    raise Fault(lanes[0], "ends while its copies are under way")
        at[taking] = over
        released(state, at, waiting, over)
    elif name == "trap":
        if taking.any():
            raise Fault(int(np.flatnonzero(taking)[0]), "reaches a trap")
    else:
        if last.operands != (0,) or "sync" not in last.parts or name != "bar" and "aligned" not in last.parts:
            raise Unknown(f"the emulator doesn't know barriers but those of the whole program: {last.text}")
        waiting |= taking
        released(state, at, waiting, over)


def released(state, at, waiting, over):
    """Let those programs go on whose lanes are all at the barrier, or at their end; those of a warp at one barrier."""
    here = (waiting | (at >= over)).reshape(-1, state.threads).all(1) & waiting.reshape(-1, state.threads).any(1)
    if here.any():
        where = at.reshape(-1, 32)
        apart = (waiting.reshape(-1, 32) & (where != np.where(waiting, at, 0).reshape(-1, 32).max(1)[:, None])).ravel()
        if apart.any():
            raise Fault(int(np.flatnonzero(apart)[0]), "waits at a barrier while others of its warp wait at another")
        state.counts.barriers += int(here.sum())
        state.shared.barrier(None if here.all() else here)
        waiting.reshape(-1, state.threads)[here] = False

