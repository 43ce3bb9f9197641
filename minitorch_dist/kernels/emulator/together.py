"""Instructions in which the lanes of a warp work together, or of four: shfl, redux, vote, ldmatrix, mma, wgmma."""

import numpy as np

from . import warps
from .arithmetic import F32, TYPES, U32
from .lanes import Unknown, address, reader, writer
from .memory import Fault


def whole_warp(make):
    """Of instructions whose last operand is the mask of the lanes that take part: here all 32 do, or it is Unknown."""
    def made(one):
        run = make(one) if one.parts[1] == "sync" else None
        if run is None:
            return None
        members = reader(one.operands[-1], U32)

        def checked(state, mask):
            if (state.spread(members(state))[state.lanes(mask)] != 0xffffffff).any():
                raise Unknown(f"the emulator doesn't know {one.text} of a part of a warp")
            run(state, mask)
        return checked
    return made


@whole_warp
def shuffle(one):
    """shfl.sync."""
    target, source, b, c, _ = one.operands
    target, _, inside = target.partition("|")
    put, put_inside = writer(target), writer(inside or "_")
    read, b, c = reader(source, U32), reader(b, U32), reader(c, U32)

    def run(state, mask):
        values, which = state.of_warps(read(state), mask)
        far, clamp = state.of_warps(b(state), mask)[0], state.of_warps(c(state), mask)[0]
        found, valid = warps.shuffled(one.parts[2], values, far, clamp)
        put_back(state, put, found, which, mask)
        put_back(state, put_inside, valid, which, mask)
    return run


@whole_warp
def reduce(one):
    """redux.sync: of the whole warp."""
    dtype, function = TYPES[one.parts[-1]], warps.REDUCED.get(one.parts[2])
    if dtype.kind == "f" and "NaN" not in one.parts:
        function = {"min": np.fmin.reduce, "max": np.fmax.reduce}.get(one.parts[2])
    if function is None or "abs" in one.parts:
        return None
    put, read = writer(one.operands[0]), reader(one.operands[1], dtype)

    def run(state, mask):
        values, which = state.of_warps(read(state), mask)
        put_back(state, put, np.repeat(function(values, axis=1, dtype=dtype).view(U32)[:, None], 32, 1), which, mask)
    return run


@whole_warp
def vote(one):
    """vote.sync."""
    put, read = writer(one.operands[0]), reader(one.operands[1], TYPES["pred"])
    mode = one.parts[2]

    def run(state, mask):
        values, which = state.of_warps(read(state), mask)
        if mode == "ballot":
            found = (values.astype(U32) << np.arange(32, dtype=U32)).sum(1, dtype=U32)
        else:
            found = {"any": values.any(1), "all": values.all(1), "uni": values.all(1) | ~values.any(1)}[mode]
        put_back(state, put, np.repeat(found[:, None], 32, 1), which, mask)
    return run


def matrices(one):
    """ldmatrix and stmatrix: 1, 2 or 4 matrices of 8 rows of 16 bytes; lanes 8i … 8i + 7 say where those of i are."""
    if not {"m8n8", "b16"} <= set(one.parts) or not {"shared", "shared::cta"} & set(one.parts):
        return None
    count = int(next(part for part in one.parts if part in ("x1", "x2", "x4"))[1:])
    transposed = "trans" in one.parts
    loads = one.parts[0] == "ldmatrix"
    registers, where = one.operands if loads else one.operands[::-1]
    at = address(where, U32)

    def rows(state, mask):
        of_warps, which = state.of_warps(at(state), mask)
        numbers = np.arange(state.size).reshape(-1, 32)[which][:, :8 * count]
        addresses = of_warps[:, :8 * count].ravel()
        state.counts.shared_access(one.place, "load" if loads else "store", addresses, 16, numbers.ravel(), 8)
        return addresses, numbers.ravel(), which

    if loads:
        puts = [writer(register) for register in registers]

        def run(state, mask):
            addresses, lanes, which = rows(state, mask)
            # A row, 16 bytes at the lane's address, is read by the lanes that get it: the warp.
            tiles = np.stack(state.shared.load(addresses, 2, 8, lanes), 1).reshape(-1, count, 8, 8)
            tiles = tiles.swapaxes(2, 3) if transposed else tiles
            found = np.ascontiguousarray(tiles).view(U32).reshape(-1, count, 32)
            for i, put in enumerate(puts):
                every = np.zeros((state.size // 32, 32), U32)
                every[which] = found[:, i]
                put(state, every.ravel(), mask)
        return run
    read = [reader(register, U32) for register in registers]

    def run(state, mask):
        addresses, lanes, _ = rows(state, mask)
        found = np.stack([state.of_warps(get(state), mask)[0] for get in read], 1)
        tiles = np.ascontiguousarray(found).view(np.uint16).reshape(-1, count, 8, 8)
        tiles = np.ascontiguousarray(tiles.swapaxes(2, 3) if transposed else tiles)
        state.shared.store(addresses, 2, list(tiles.reshape(-1, 8).T), lanes)
    return run


def fragments(registers, dtype):
    """(state, mask) -> (registers, warps, 32) and which warps."""
    read = [reader(register, dtype) for register in registers]

    def run(state, mask):
        found = [state.of_warps(get(state), mask) for get in read]
        return np.stack([values for values, _ in found]), found[0][1]
    return run


def put_back(state, put, found, which, mask):
    """A warp-wide result (warps that take part, 32) into a register."""
    every = np.zeros((state.size // 32, 32), found.dtype)
    every[which] = found
    put(state, every.ravel(), mask)


def multiply(one):
    """mma.sync.aligned.m16n8k….row.col.f32.T.T.f32."""
    shape, (*_, result, kind, other, addend) = one.parts[3], one.parts
    if (result, addend) != ("f32", "f32") or kind not in warps.WIDTH or kind != other or not shape.startswith("m16n8k"):
        return None
    d, a, b, c = one.operands
    a, b, c = fragments(a, U32), fragments(b, U32), fragments(c, F32)
    puts, flops = [writer(register) for register in d], 2 * 16 * 8 * int(shape[6:])

    def run(state, mask):
        left, which = a(state, mask)
        found = warps.mma(kind, left, b(state, mask)[0], c(state, mask)[0])
        state.counts.flops["tensor"] += flops * found.shape[1]
        for put, values in zip(puts, found, strict=True):
            put_back(state, put, values, which, mask)
    return run


def group_multiply(one):
    """wgmma.mma_async: four warps; B, and A if it isn't in registers, in shared memory. The sums are there at once;
    that nobody looks at them before they are waited for is for ptxas to see to."""
    if one.parts[1] != "mma_async":
        return lambda state, mask: None        # fence, commit_group, wait_group
    shape, (*_, result, kind, other) = one.parts[4], one.parts
    if result != "f32" or kind not in warps.WIDTH or kind != other or not shape.startswith("m64n"):
        return None
    n, k = (int(part) for part in shape[4:].split("k"))
    d, a, b, scale, sign_a, sign_b, *transposed = one.operands
    if (sign_a, sign_b) != (1, 1):
        return None
    itemsize = warps.WIDTH[kind]
    in_registers = isinstance(a, tuple)
    along_k = [flag == 0 for flag in transposed] or [True, True]
    a_along, b_along = along_k if len(along_k) == 2 else (True, along_k[0])
    puts = [writer(register) for register in d]
    before = fragments(d if scale != 0 else [0] * len(d), F32)     # with 0 they may never have been written
    left = fragments(a, U32) if in_registers else reader(a, TYPES["u64"])
    right, keep = reader(b, TYPES["u64"]), reader(scale, TYPES["pred"])

    def tile(state, descriptors, groups, outer, along):
        """(groups, outer, k) float32 of what a descriptor says: each group's first lane's."""
        out = np.empty((len(groups), outer, k), F32)
        for i, group in enumerate(groups):
            words = warps.Descriptor(int(descriptors[128 * group])).addresses(outer, k, itemsize, along)
            lanes = np.full(words.size, 128 * group)
            found, = state.shared.load(words.ravel().astype(U32), itemsize, 1, lanes)
            out[i] = warps.as_numbers(found, kind).reshape(outer, k)
        return out

    def run(state, mask):
        c, which = before(state, mask)
        active = np.ones(state.size // 128, bool) if mask is None else mask.reshape(-1, 128).any(1)
        if mask is not None and not mask.reshape(-1, 128)[active].all():
            raise Fault(int(np.flatnonzero(mask)[0]), "an instruction of four warps is reached by a part of them")
        groups = np.flatnonzero(active)
        if in_registers:
            x = warps.a_tile(left(state, mask)[0], kind).reshape(len(groups), 64, k)
        else:
            x = tile(state, state.spread(left(state)), groups, 64, a_along)
        y = tile(state, state.spread(right(state)), groups, n, b_along).swapaxes(1, 2)
        kept = state.spread(keep(state))[128 * groups]
        state.counts.flops["tensor"] += 2 * 64 * n * k * len(groups)
        for put, values in zip(puts, warps.wgmma(x, y, c, kept), strict=True):
            put_back(state, put, values, which, mask)
    return run
