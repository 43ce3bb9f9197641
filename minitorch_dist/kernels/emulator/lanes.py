"""The state of a batch of programs, and operands as functions of it."""

import numpy as np

from .arithmetic import TYPES, U32, UNSIGNED
from .memory import Fault


class EmulationError(RuntimeError):
    """A kernel has done what it must not."""


class Unknown(NotImplementedError):
    """An instruction that the emulator hasn't learnt."""


SPECIAL = frozenset(["%laneid", "%warpid", *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid")
                                             for axis in "xyz")])


def whole_warps(threads):
    """Lanes of the warps that this many threads take."""
    return -(-threads // 32) * 32


class Lanes:
    """The state of a batch of programs.

    size, threads  lanes of the batch and of a program: whole warps, whose last lanes may be nobody's
    absent      which lanes never run
    registers   {name: array (lanes,), or a number}: unsigned as wide as it was written, or bool
    committed   groups of cp.async that each lane has closed; copies: those under way
    """

    def __init__(self, program, first, count, block, grid, parameters, memory, shared, local, counts):
        self.program, self.first, self.parameters, self.counts = program, first, parameters, counts
        self.memory, self.shared, self.local = memory, shared, local
        grid, block = [*grid, 1, 1][:3], [*block, 1, 1][:3]
        threads = int(np.prod(block))
        self.threads = whole_warps(threads)
        self.size = count * self.threads
        self.all = np.arange(self.size)
        index, tid = first + self.all // self.threads, self.all % self.threads
        self.absent = tid >= threads
        self.registers = {
            "%tid.x": (tid if block[0] == threads else tid % block[0]).astype(U32),
            "%tid.y": U32.type(0) if block[1] == 1 else (tid // block[0] % block[1]).astype(U32),
            "%tid.z": U32.type(0) if block[2] == 1 else (tid // (block[0] * block[1])).astype(U32),
            "%laneid": (tid % 32).astype(U32), "%warpid": (tid // 32).astype(U32),
            "%ctaid.x": (index % grid[0]).astype(U32), "%ctaid.y": (index // grid[0] % grid[1]).astype(U32),
            "%ctaid.z": (index // (grid[0] * grid[1])).astype(U32),
            **{f"%n{what}.{axis}": U32.type(n) for what, counts in (("ctaid", grid), ("tid", block))
               for axis, n in zip("xyz", counts, strict=True)}}
        self.committed = np.zeros(self.size, np.int64)
        self.copies = []

    def lanes(self, mask):
        """The numbers of the lanes that take part."""
        return self.all if mask is None else np.flatnonzero(mask)

    def spread(self, value):
        """An element per lane."""
        return np.broadcast_to(value, self.size)

    def of_warps(self, value, mask):
        """(warps that take part, 32) of a value, and these warps' numbers."""
        rows = self.spread(value).reshape(-1, 32)
        if mask is None:
            return rows, slice(None)
        some = mask.reshape(-1, 32)
        which = some.any(1)
        if not some[which].all():
            lane = int(np.flatnonzero(some.any(1) & ~some.all(1))[0]) * 32
            raise Fault(lane, "an instruction of the whole warp is reached by a part of its lanes")
        return rows[which], which

    def where(self, lane):
        """A lane for people."""
        return f"program {self.first + int(lane) // self.threads}, thread {int(lane) % self.threads}"


def bits(value, dtype):
    """A register's value as another type of its width, or its lowest bits."""
    if value.dtype == dtype:
        return value
    if value.dtype.itemsize == dtype.itemsize:
        return value.view(dtype)
    if value.dtype.itemsize > dtype.itemsize:
        return value.astype(UNSIGNED[dtype.itemsize]).view(dtype)
    raise Unknown(f"{dtype} out of a register of {8 * value.dtype.itemsize} bits")


def reader(operand, dtype):
    """state -> an operand's value, of this dtype."""
    if isinstance(operand, int):
        constant = operand != 0
        if dtype != np.bool_:
            wide = operand & ((1 << 8 * dtype.itemsize) - 1)
            constant = np.asarray(wide, UNSIGNED[dtype.itemsize]).view(dtype)[()]
        return lambda state: np.bool_(constant) if dtype == np.bool_ else constant
    # Compilers copy registers that have no value yet; what is computed from one is NaN.
    poison = dtype.type(True) if dtype == np.bool_ else np.asarray(-1, f"i{dtype.itemsize}").view(dtype)[()]

    def read(state):
        value = state.registers.get(operand)
        return poison if value is None else bits(value, dtype)
    return read


def writer(operand):
    """(state, value, mask) -> None: put into a register."""
    def write(state, value, mask):
        if value.dtype.kind == "f":
            value = value.view(UNSIGNED[value.dtype.itemsize])
        if mask is not None:
            before = state.registers.get(operand)
            if before is not None:
                value = np.where(mask, value, before if before.dtype == value.dtype else bits(before, value.dtype))
        state.registers[operand] = value
    return (lambda *args: None) if operand == "_" else write


def address(operand, dtype):
    """state -> addresses of an Address operand. dtype: of the register; None: unsigned, 32 bits or 64."""
    if dtype is None:
        narrow, wide = address(operand, TYPES["u32"]), address(operand, TYPES["u64"])

        def either(state):
            value = state.registers.get(operand.base)
            return narrow(state).astype(np.uint64) if value is not None and value.dtype.itemsize == 4 else wide(state)
        return either
    if operand.base is None:
        return reader(operand.offset, dtype)
    base, offset = reader(operand.base, dtype), dtype.type(operand.offset % 2 ** (8 * dtype.itemsize))
    return base if not operand.offset else lambda state: base(state) + offset
