"""Compile examples of kernels, or the Variants of a pickle for 8.0 and 9.0; prints a JSON line of facts for each.

A process of its own, because Triton either interprets or compiles. Of Adam's first example, for 7.5 and for 9.0:

    python -m tests.kernels.compile_all adam-0-sm75 adam-0-sm90
"""

import json
import pickle
import re
import struct
import sys
from collections import Counter
from itertools import accumulate, pairwise

from minitorch_dist.kernels import build, show, table

NAME = re.compile(r"(\w+)-(\d+)-sm(\d+)")      # of a kernel, its example and a compute capability
WATCHED = re.compile(r"\b(LDG|LDGSTS|STG|LDL|STL|HGMMA|HMMA)((?:\.\w+)*) ")
WIDE = re.compile(r"\.(64|128)\b")         # of global memory: what is kept in local memory is one kind, however wide
CODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(\S+) ([^;]*);")
PLACE = re.compile(r"/\*([0-9a-f]{4,})\*/")
EXECUTABLE = 4      # of a section's flags
MACHINES = {80: "80", 90: "90a"}        # as the disassembler calls them
# What is compiled for 9.0, by how its name begins, and a version of Triton -> bytes of a thread's registers that this
# version keeps in memory for want of room; nothing else has any. (3.9's assembler wants a product in float32 in 96
# registers, as 3.6's, and lacks three: one is loaded again in each round of 512 multiplications.)
SPILLED = {("flash_attention_sources-1-", "3.7"): 8, ("flash_attention_sources-4-", "3.7"): 16,
           ("flash_attention_sources-4-", "3.8"): 16, ("matmul-1-", "3.9"): 16, ("a product in float32", "3.9"): 16}


def spilled(name):
    """Bytes of SPILLED for the Triton that is there; 0 if it isn't known to spill."""
    import triton
    version = ".".join(triton.__version__.split(".")[:2])
    return max((size for (begin, of), size in SPILLED.items() if of == version and name.startswith(begin)), default=0)


def compiled(kernel, number, capability):
    """(what the tests want to know about one compiled example, its machine code)."""
    types, options = kernel.example(kernel.examples[number], capability)
    binary = build.build(kernel, types, show.divisible(kernel, types), options, capability)
    found = {"id": f"{kernel.name}-{number}-sm{capability}", "types": binary.types, "scratch": binary.scratch,
             "shared": binary.shared, "cubin": len(binary.cubin)}
    return found, binary.cubin


def chosen(variant, capability):
    """The machine code of a Variant."""
    kernel = table()[variant.kernel]
    return build.build(kernel, dict(variant.types), variant.divisible, dict(variant.options), capability).cubin


def taken_apart(cubins, capability=90):
    """What machine code is made of: a dict for each cubin. One run of the disassembler for all, for it takes
    half a second to begin, and next to none for a kernel."""
    parts = [instructions(cubin) for cubin in cubins]
    lines = show.listing(b"".join(parts), "nvdisasm", f"--binary=SM{MACHINES[capability]}").splitlines()
    placed = [(int(found[1], 16), line) for line in lines if (found := PLACE.search(line))]
    for cubin, (first, end) in zip(cubins, pairwise(accumulate(map(len, parts), initial=0)), strict=True):
        code = "\n".join(line for place, line in placed if first <= place < end)
        memory = Counter(op + (WIDE.search(rest) or [""])[0] * ("G" in op) for op, rest in WATCHED.findall(code))
        yield show.usage(cubin) | {"memory": memory, "together": together(code)}


def instructions(cubin):
    """The executable sections of a cubin, which is a 64-bit ELF file."""
    table, = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<QQQQ", cubin, table + i * size + 8) for i in range(count)]
    return b"".join(cubin[place:place + length] for flags, _, place, length in sections if flags & EXECUTABLE)


def together(code):
    """How many loads to registers are under way before one of their results is used: a number for each batch of them.

    In the order of the listing, which is the order in which a warp without branches issues them.
    """
    batches, count, waiting = [], 0, set()
    for op, operands in CODE.findall(code):
        registers = [int(r) for r in re.findall(r"\bR(\d+)", operands)]
        load, writes = op.startswith("LDG."), not op.startswith(("ST", "RED", "BAR"))
        if waiting.intersection(registers[1 if writes else 0:]):
            batches, count, waiting = [*batches, count], 0, set()
        if load:
            width = 4 if ".128" in op else 2 if ".64" in op else 1
            count, waiting = count + 1, waiting | set(range(registers[0], registers[0] + width))
    return [*batches, count]


def examples(kernel, capability):
    """Numbers of those that are compiled: all for 9.0, and of kernels whose blocks lie in shared memory, of which GPUs
    have different amounts; else the first, and Adam's first of 8 bits."""
    every = range(len(kernel.examples))
    if capability == 90 or kernel.name.startswith(("matmul", "flash")):
        return every
    return [0, 5] if kernel.name == "adam" else every[:1]


if __name__ == "__main__":
    if not NAME.fullmatch(sys.argv[1]):
        with open(sys.argv[1], "rb") as file:
            variants = pickle.load(file)
        for machine in sorted({capability for _, capability in variants}):
            asked = [variant for variant, capability in variants if capability == machine]
            for facts in taken_apart([chosen(variant, machine) for variant in asked], machine):
                print(json.dumps(facts))
        sys.exit()
    made = {}       # {capability: what compiled() has given}
    for name in sys.argv[1:]:
        kernel, number, machine = NAME.fullmatch(name).groups()
        try:
            made.setdefault(int(machine), []).append(compiled(table()[kernel], int(number), int(machine)))
        except Exception as error:
            print(json.dumps({"id": name, "error": f"{type(error).__name__}: {error}"}), flush=True)
    for machine, found in made.items():
        more = taken_apart([cubin for _, cubin in found]) if machine == 90 else [{}] * len(found)
        for one, other in zip(found, more, strict=True):
            print(json.dumps(one[0] | other))
