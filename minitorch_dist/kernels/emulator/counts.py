"""What an emulated kernel has cost: sectors of memory, wavefronts of shared memory, instructions, operations.

    global memory   a warp's access asks for the sectors of 32 bytes that its lanes touch; as few as possible where
                    neighbours read neighbours. A sector asked for twice may come from a cache: `unique` counts it once
    shared memory   has 32 banks of 4 bytes; lanes that want different words of one bank wait for each other. A warp's
                    access takes as many wavefronts as the busiest bank has words, at least one per 128 bytes

Source: NVIDIA, "CUDA C++ Programming Guide" (device memory accesses, shared memory) and Nsight Compute's metrics.
"""

import linecache
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ... import tables
from .memory import SECTOR

BANKS, WORD = 32, 4


class GPU(NamedTuple):
    """What a multiprocessor does in a cycle, at most: 4 instructions of warps, 1 wavefront, and these.

    bytes   of memory that are its share; flops in tensor cores, of 16-bit floats (of tf32 half as many)
    """

    name: str
    bytes: float
    flops: int


# Compute capability -> a GPU of it. Source: NVIDIA's data sheets: bandwidth / (multiprocessors · clock), with the clock
# that the sheet's teraflops are for: 0.32 TB/s / (40 · 1.59 GHz), 2.04 / (108 · 1.41), 4.8 / (132 · 1.83).
GPUS = {75: GPU("T4", 5.0, 1024), 80: GPU("A100", 13.4, 2048), 90: GPU("H200", 19.9, 4096)}


@dataclass
class Access:
    """The accesses of one kind.

    requests  instructions of warps
    bytes     that a warp's lanes ask for; of global memory once where several lanes want the same
    units     sectors or wavefronts; least: as few as are possible
    """

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
    barriers                  that programs came to
    diverged                  how often a part of a warp ran a block of instructions alone
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
        warp = (lanes // 32).astype(np.uint64) << np.uint64(48)
        wanted = np.unique(warp | addresses)
        sectors = np.unique(wanted // np.uint64(SECTOR))
        _, per_warp = np.unique(wanted >> np.uint64(48), return_counts=True)
        self.note(place, f"global {verb}").add(len(per_warp), len(wanted) * size, len(sectors),
                                               int(np.sum(-(-per_warp * size // SECTOR))))

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

    def cycles(self, capability):
        """{what a kernel may wait for: cycles of one multiprocessor that it takes at least} on one of GPUS.

        Of memory each sector once, as if a cache held the rest; of instructions PTX's, of which ptxas makes about as
        many; nothing of how long a load is under way, or of the launch.
        """
        gpu = GPUS[capability]
        waves = sum(self.access(f"shared {verb}").units for verb in ("load", "store"))
        return {"memory": (sum(self.read.values()) + sum(self.written.values())) / gpu.bytes,
                "instructions": sum(self.instructions.values()) / 4, "shared memory": float(waves),
                "tensor cores": self.flops["tensor"] / gpu.flops}

    def sums(self, capability=None):
        """Lines for people: what the launch has asked for, all in all; and what a GPU of GPUS would wait for."""
        lines = [f"{self.kernel}: {' × '.join(f'{n:,}' for n in self.grid)} programs of {self.threads} threads, "
                 f"{sum(self.instructions.values()):,} instructions of warps, {self.barriers:,} barriers",
                 f"  operations    {self.flops['cuda']:,} of floats, and {self.flops['tensor']:,} in tensor cores"]
        for verb, touched in (("load", self.read), ("store", self.written)):
            one = self.access(f"global {verb}")
            if one.requests:
                lines.append(f"  global {verb:5}  {one.bytes:,} bytes in {one.units:,} sectors of {SECTOR}, "
                             f"{100 * one.bytes / (SECTOR * one.units):.0f} % of them used. Once at least: "
                             + ", ".join(f"{size:,} of {name}" for name, size in touched.items()))
        for verb in ("load", "store"):
            one = self.access(f"shared {verb}")
            if one.requests:
                lines.append(f"  shared {verb:5}  {one.bytes:,} bytes in {one.units:,} wavefronts, "
                             f"{one.units - one.least:,} of them for bank conflicts")
        if capability in GPUS:
            cycles = self.cycles(capability)
            words = ", ".join(f"{what} {n:,.0f}" for what, n in cycles.items())
            lines.append(f"  cycles        {words}: of one multiprocessor ({GPUS[capability].name}), at least. "
                         f"Most: {max(cycles, key=cycles.get)}")
        return lines

    def by_line(self):
        """Lines for people: the Python that asked for it, with what it asked for."""
        rows = [("line", "instructions", "global: bytes", "sectors", "shared: wavefronts", "conflicts", "")]
        for place in sorted(self.instructions):
            kinds = self.by_place.get(place, {})
            world, chip = ([one for kind, one in kinds.items() if kind.startswith(space)] for space in
                           ("global", "shared"))
            numbers = (self.instructions[place], sum(one.bytes for one in world), sum(one.units for one in world),
                       sum(one.units for one in chip), sum(one.units - one.least for one in chip))
            file, line = place
            rows.append((f"{Path(file).name}:{line}", *(f"{n:,}" if n else "" for n in numbers),
                         linecache.getline(file, line).strip()[:70]))
        lines = tables.aligned([row[:-1] for row in rows])
        width = max(map(len, lines))
        return [f"{line:{width}}  {row[-1]}".rstrip() for line, row in zip(lines, rows, strict=True)]
