"""Compile every example of every kernel for the given compute capabilities; prints a JSON line of facts for each.

A process of its own, because Triton either interprets or compiles: python -m tests.kernels.compile_all 75 90
"""

import json
import re
import sys
from collections import Counter

from minitorch_dist.kernels import build, show, table

MEMORY = re.compile(r"\b(LDG|STG|LDL|STL)((?:\.\w+)*)")


def facts(kernel, number, capability):
    """What the tests want to know about one compiled example."""
    types, options = kernel.example(kernel.examples[number])
    binary = build.build(kernel, types, show.divisible(kernel, types), options, capability)
    found = {"id": f"{kernel.name}-{number}-sm{capability}", "types": binary.types, "scratch": binary.scratch,
             "shared": binary.shared, "cubin": len(binary.cubin)}
    if capability == 90:        # taking machine code apart takes as long as making it
        found |= show.usage(binary.cubin)
        found["memory"] = Counter(op + (".128" if ".128" in rest else "")
                                  for op, rest in MEMORY.findall(show.listing(binary.cubin)))
    return found


for argument in sys.argv[1:]:
    for one in table().values():
        for index in range(len(one.examples)):
            try:
                print(json.dumps(facts(one, index, int(argument))), flush=True)
            except Exception as error:
                print(json.dumps({"id": f"{one.name}-{index}-sm{argument}",
                                  "error": f"{type(error).__name__}: {error}"}), flush=True)
