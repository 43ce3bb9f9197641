"""Compile every example of every kernel for the given compute capabilities; prints a JSON line of facts for each.

A process of its own, because Triton either interprets or compiles: python -m tests.kernels.compile_all 75 90
"""

import json
import re
import sys
from collections import Counter

from minitorch_dist.kernels import build, show, table

WATCHED = re.compile(r"\b(LDG|LDGSTS|STG|LDL|STL|HGMMA|HMMA)((?:\.\w+)*) ")
CODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(\S+) ([^;]*);")


def facts(kernel, number, capability):
    """What the tests want to know about one compiled example."""
    types, options = kernel.example(kernel.examples[number])
    binary = build.build(kernel, types, show.divisible(kernel, types), options, capability)
    found = {"id": f"{kernel.name}-{number}-sm{capability}", "types": binary.types, "scratch": binary.scratch,
             "shared": binary.shared, "cubin": len(binary.cubin)}
    if capability == 90:        # taking machine code apart takes as long as making it
        found |= show.usage(binary.cubin)
        code = show.listing(binary.cubin)
        found["memory"] = Counter(op + (".128" if ".128" in rest else "") for op, rest in WATCHED.findall(code))
        found["together"] = together(code)
    return found


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
    have different amounts; else the first."""
    every = range(len(kernel.examples))
    return every if capability == 90 or kernel.name.startswith(("matmul", "flash")) else every[:1]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for one in table().values():
            for index in examples(one, int(argument)):
                try:
                    print(json.dumps(facts(one, index, int(argument))), flush=True)
                except Exception as error:
                    print(json.dumps({"id": f"{one.name}-{index}-sm{argument}",
                                      "error": f"{type(error).__name__}: {error}"}), flush=True)
