"""What an emulated kernel has cost: sectors of memory, wavefronts of shared memory, instructions, operations.

    global memory   a warp's access asks for the sectors of 32 bytes that its lanes touch; as few as possible where
                    neighbours read neighbours. A sector asked for twice may come from a cache: `unique` counts it once
    shared memory   has 32 banks of 4 bytes; lanes that want different words of one bank wait for each other. A warp's
                    access takes as many wavefronts as the busiest bank has words, at least one per 128 bytes

Source: NVIDIA, "CUDA C++ Programming Guide" (device memory accesses, shared memory) and Nsight Compute's metrics.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .memory import SECTOR

BANKS, WORD = 32, 4


@dataclass
class Access:
    """The accesses of one kind. bytes: asked for by lanes; units: sectors or wavefronts; least: as few as possible."""

    requests: int = 0
    bytes: int = 0
    units: int = 0
    least: int = 0

    def add(self, requests, size, units, least):
        self.requests += requests
        self.bytes += size
        self.units += units
        self.least += least


KINDS = ("global load", "global store", "shared load", "shared store")


@dataclass
class Counts:
    """One launch.

    kernel, grid, threads     what was started; threads per program
    by_place                  {(file, line): {kind of access: Access}}
    instructions              {(file, line): instructions that warps have issued}
    flops                     floating-point operations of lanes that were active, by unit: "cuda", "tensor"
    read, written             bytes of arrays, {argument: sectors touched at least once · 32}
    barriers, diverged        barriers that programs came to; blocks of instructions that a part of a warp ran alone
    """

    kernel: str
    grid: tuple
    threads: int
    by_place: dict = field(default_factory=dict)
    instructions: Counter = field(default_factory=Counter)
    flops: Counter = field(default_factory=Counter)
    read: dict = field(default_factory=dict)
    written: dict = field(default_factory=dict)
    barriers: int = 0
    diverged: int = 0

    def access(self, kind):
        """The sum of one of KINDS."""
        total = Access()
        for kinds in self.by_place.values():
            if kind in kinds:
                one = kinds[kind]
                total.add(one.requests, one.bytes, one.units, one.least)
        return total

    def note(self, place, kind):
        return self.by_place.setdefault(place, {}).setdefault(kind, Access())

    def global_access(self, place, verb, addresses, size, lanes):
        """A warp-wide access to global memory: the addresses of active lanes, bytes per lane."""
        keys = (lanes // 32).astype(np.uint64) << np.uint64(44) | addresses // np.uint64(SECTOR)
        keys = np.unique(keys)
        warps = np.unique(lanes // 32, return_counts=True)[1]
        self.note(place, f"global {verb}").add(len(warps), len(lanes) * size, len(keys),
                                               int(np.sum(-(-warps * size // SECTOR))))

    def shared_access(self, place, verb, addresses, size, lanes, phase_lanes=None):
        """A warp-wide access to shared memory. phase_lanes: lanes whose words go together, if not 128 bytes'."""
        words = max(size // WORD, 1)
        per_phase = phase_lanes or min(BANKS, BANKS // words)
        phase = lanes // per_phase
        word = (addresses[:, None] // WORD + np.arange(words)).astype(np.int64)
        keys = np.unique((phase[:, None] << 40 | word).ravel())
        phases, bank = keys >> 40, keys % BANKS
        pairs, busy = np.unique(phases * BANKS + bank, return_counts=True)
        ends = np.flatnonzero(np.diff(pairs // BANKS, append=-1))
        starts = np.concatenate(([0], ends[:-1] + 1))
        waves = int(np.maximum.reduceat(busy, starts).sum())
        self.note(place, f"shared {verb}").add(len(np.unique(lanes // 32)), len(lanes) * size, waves, len(ends))

    def table(self, source=None):
        """Lines for people: the sums, then what each line of Python asks for. source(file, line) -> its text."""
        programs = int(np.prod(self.grid))
        lines = [f"{self.kernel}: {programs:,} programs of {self.threads} threads",
                 f"  {sum(self.instructions.values()):,} instructions of warps, {self.flops['cuda']:,} floating-point "
                 f"operations, {self.flops['tensor']:,} in tensor cores; {self.barriers:,} barriers"]
        for verb, touched in (("load", self.read), ("store", self.written)):
            one = self.access(f"global {verb}")
            if one.requests:
                unique = sum(touched.values())
                lines.append(f"  global {verb:5}  {one.bytes:>13,} bytes in {one.units:,} sectors of 32 "
                             f"({100 * one.bytes / (SECTOR * one.units):.0f} % used), {unique:,} bytes at least once: "
                             + ", ".join(f"{name} {size:,}" for name, size in touched.items()))
        for verb in ("load", "store"):
            one = self.access(f"shared {verb}")
            if one.requests:
                lines.append(f"  shared {verb:5}  {one.bytes:>13,} bytes in {one.units:,} wavefronts, "
                             f"{one.units - one.least:,} of them for bank conflicts")
        return lines
