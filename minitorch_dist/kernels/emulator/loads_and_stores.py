"""Instructions that touch memory, each lane for itself: ld, st, atom, cp.async."""

from functools import partial

import numpy as np

from .arithmetic import PAIRS, TYPES, U32, UNSIGNED, flushed, per_number
from .lanes import address, reader, writer
from .memory import LOCAL_BASE, LOCAL_MOST, SHARED_BASE, SHARED_MOST, Fault

SPACES = {"global": "global", "const": "global", "shared": "shared", "shared::cta": "shared", "local": "local",
          "param": "local"}         # param: of a function, a part of its caller's own memory. No word: the address says
# What else the names of ld and st may have. Every access has its place in one order, and caches are not emulated.
WORDS = {"weak", "volatile", "relaxed", "acquire", "release", "cta", "gpu", "sys", "nc", "v2", "v4", "v8", "ca", "cg",
         "cs", "lu", "cv", "wb", "wt"}


def access(one):
    """ld and st: (space, type, bytes of an element, the address, the registers), or None."""
    *words, kind = [part for part in one.parts[1:] if part[:3] not in ("L1:", "L2:")]
    spaces = [SPACES[word] for word in words if word in SPACES]
    if (len(spaces) > 1 or set(words) - WORDS - set(SPACES) or len(one.operands) != 2
            or kind not in TYPES and kind not in PAIRS):
        return None         # with a policy for caches
    where, registers = one.operands if one.parts[0] == "st" else one.operands[::-1]
    registers = registers if isinstance(registers, tuple) else (registers,)
    return (spaces or ["any"])[0], kind, TYPES[PAIRS[kind][1] if kind in PAIRS else kind].itemsize, where, registers


def parameter(one, size):
    """ld.param of a kernel's parameter of so many bytes: a number, or a part of a structure."""
    if one.parts[0] != "ld" or (found := access(one)) is None:
        return None
    _, kind, width, where, registers = found
    end = where.offset + width * len(registers)
    if where.offset < 0 or end > size:
        return None
    puts, extend = [writer(register) for register in registers], extension(one, kind)

    def run(state, mask):
        given = np.atleast_1d(state.parameters[where.base]).view(np.uint8)[where.offset:end].tobytes()
        for put, value in zip(puts, np.frombuffer(given, UNSIGNED[width]), strict=True):
            put(state, extend(value), mask)
    return run


def extension(one, kind):
    """What makes a loaded value, unsigned, as wide as the register it goes to."""
    given, size = TYPES[kind if kind in TYPES else PAIRS[kind][1]], one.bytes
    if size is None or size <= given.itemsize:
        return lambda value: value
    wide = np.dtype(f"{'i' if given.kind == 'i' else 'u'}{size}")
    narrow = given if given.kind == "i" else UNSIGNED[given.itemsize]
    return lambda value: value.view(narrow).astype(wide).view(UNSIGNED[size])


# Of addresses: those of a thread's own memory come in either width.
WIDTHS = {"shared": U32, "global": TYPES["u64"], "any": TYPES["u64"]}


def spaces_of(addresses):
    """[(space, which of the addresses are in it)]."""
    shared = (addresses >= SHARED_BASE) & (addresses < SHARED_BASE + SHARED_MOST)
    local = (addresses >= LOCAL_BASE) & (addresses < LOCAL_BASE + LOCAL_MOST)
    return [(space, np.flatnonzero(inside)) for space, inside in (
        ("shared", shared), ("local", local), ("global", ~(shared | local))) if inside.any()]


def read_from(state, one, space, addresses, width, count, lanes):
    """[values, …] of lanes: `count` unsigned numbers of `width` bytes at each address. What is a thread's own isn't
    counted: few kernels have any."""
    if space == "any":
        out = [np.empty(len(lanes), UNSIGNED[width]) for _ in range(count)]
        for space, which in spaces_of(addresses):
            found = read_from(state, one, space, addresses[which], width, count, lanes[which])
            for every, values in zip(out, found, strict=True):
                every[which] = values
        return out
    if space == "local":
        return state.local.load(addresses, width, count, lanes)
    if space == "shared":
        state.counts.shared_access(one.place, "load", addresses, width * count, lanes)
        return state.shared.load(addresses, width, count, lanes)
    state.counts.global_access(one.place, "load", addresses, width * count, lanes)
    return state.memory.load(addresses, width, count, lanes)


def write_to(state, one, space, addresses, width, values, lanes):
    """The way back."""
    if space == "any":
        for space, which in spaces_of(addresses):
            write_to(state, one, space, addresses[which], width, [value[which] for value in values], lanes[which])
    elif space == "local":
        state.local.store(addresses, width, values, lanes)
    elif space == "shared":
        state.counts.shared_access(one.place, "store", addresses, width * len(values), lanes)
        state.shared.store(addresses, width, values, lanes)
    else:
        state.counts.global_access(one.place, "store", addresses, width * len(values), lanes)
        state.memory.store(addresses, width, values, lanes)


def load(one):
    """ld of every space."""
    if (found := access(one)) is None:
        return None
    space, kind, width, where, registers = found
    at = address(where, WIDTHS.get(space))
    puts = [writer(register) for register in registers]
    extend = extension(one, kind)

    def run(state, mask):
        lanes = state.lanes(mask)
        addresses = state.spread(at(state))[lanes]
        found = read_from(state, one, space, addresses, width, len(puts), lanes)
        for put, value in zip(puts, found, strict=True):
            value = extend(value)
            if mask is not None:
                every = np.zeros(state.size, value.dtype)
                every[lanes] = value
                value = every
            put(state, value, mask)
    return run


def store(one):
    """st of every space."""
    if (found := access(one)) is None:
        return None
    space, _, width, where, registers = found
    at = address(where, WIDTHS.get(space))
    read = [reader(register, UNSIGNED[width]) for register in registers]

    def run(state, mask):
        lanes = state.lanes(mask)
        addresses = state.spread(at(state))[lanes]
        write_to(state, one, space, addresses, width, [state.spread(get(state))[lanes] for get in read], lanes)
    return run


ATOMIC = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
          "xor": np.bitwise_xor, "exch": None, "cas": None}
# Sums of float32 take subnormal numbers for zeros, whatever they are made of, in global memory alone (PTX ISA, atom).
FLOAT_SUMS = {"f32": lambda a, b: flushed(flushed(a) + flushed(b)), "bf16": per_number(np.add, "bf16")}
ATOMIC_WORDS = {*ATOMIC, *SPACES, "relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys", "noftz"} - {
    "local", "param", "const"}


def atomic(one):
    """atom and red: one lane after the other, in the order of their numbers."""
    (*words, kind), returns = one.parts[1:], one.parts[0] == "atom"
    operation = next((word for word in words if word in ATOMIC), None)
    where, *values = one.operands[1:] if returns else one.operands
    space = next((SPACES[word] for word in words if word in SPACES), "any")
    if (operation is None or set(words) - ATOMIC_WORDS or kind not in TYPES
            or kind[0] == "f" and operation != "add" or len(values) != 1 + (operation == "cas")):
        return None
    dtype, function = TYPES[kind], ATOMIC[operation]
    if kind in FLOAT_SUMS:
        if operation != "add":
            return None
        function = FLOAT_SUMS[kind]
    put = writer(one.operands[0]) if returns else None
    at = address(where, WIDTHS.get(space))
    read = [reader(value, dtype) for value in values]

    def change(part, old, values):
        """What is there afterwards."""
        if operation == "cas":
            return values[1] if old[0] == values[0][0] else old
        if part == "shared" and kind == "f32":
            return old + values[0]
        return values[0] if function is None else function(old, values[0])

    def run(state, mask):
        lanes = state.lanes(mask)
        addresses = state.spread(at(state))[lanes]
        values = [state.spread(get(state))[lanes] for get in read]
        out = np.zeros(state.size, UNSIGNED[dtype.itemsize])
        for part, which in spaces_of(addresses) if space == "any" else [(space, range(len(lanes)))]:
            if part == "local":
                raise Fault(lanes[which[0]], "changes a thread's own memory by an instruction for what threads share")
            memory = state.memory if part == "global" else state.shared
            for i in which:
                this = slice(i, i + 1)
                new = partial(change, part, values=[value[this] for value in values])
                out[lanes[i]] = memory.exchange(addresses[this], dtype, new, lanes[this])[0]
            count = state.counts.global_access if part == "global" else state.counts.shared_access
            count(one.place, "store", addresses[which], dtype.itemsize, lanes[which])
        if put is not None:
            put(state, out, mask)
    return run


def copy(one):
    """cp.async: from global memory; the bytes land when they are waited for, behind them zeros."""
    if one.parts[2] == "commit_group":
        def commit(state, mask):
            state.committed[state.lanes(mask)] += 1
        return commit
    if one.parts[2] in ("wait_group", "wait_all"):
        left = one.operands[0] if one.parts[2] == "wait_group" else 0
        everything = one.parts[2] == "wait_all"

        def wait(state, mask):
            active = np.ones(state.size, bool) if mask is None else mask
            pending = []
            for lanes, group, places, values in state.copies:
                done = active[lanes] & (everything | (group < state.committed[lanes] - left))
                state.shared.arrive(places[done], values[done], lanes[done])
                if not done.all():
                    pending.append((lanes[~done], group[~done], places[~done], values[~done]))
            state.copies = pending
        return wait
    if one.parts[2] not in ("ca", "cg"):
        return None
    target, source, size, *valid = one.operands
    to, at = address(target, U32), address(source, TYPES["u64"])
    given = reader(valid[0] if valid else size, U32)

    def run(state, mask):
        lanes = state.lanes(mask)
        addresses, count = state.spread(at(state))[lanes], state.spread(given(state))[lanes]
        places = state.spread(to(state))[lanes]
        values = np.zeros((len(lanes), size), np.uint8)
        for part in np.unique(count):
            if part == 0:
                continue
            who = np.flatnonzero(count == part)
            if part > size or (addresses[who] % np.uint64(size)).any():
                raise Fault(lanes[who[0]], f"copies {part} of {size} bytes from {int(addresses[who[0]]):#x}: more than "
                                           f"all, or from no multiple of {size}")
            unit = min(int(part & -part), 8)
            read = [state.memory.load(addresses[who] + np.uint64(first), unit, 1, lanes[who])[0]
                    for first in range(0, int(part), unit)]
            values[who, :part] = np.stack(read, 1).view(np.uint8)
            state.counts.global_access(one.place, "load", addresses[who], int(part), lanes[who])
        state.counts.shared_access(one.place, "store", places, size, lanes)
        state.copies.append((lanes, state.committed[lanes], state.shared.expect(places, size, lanes), values))
    return run
