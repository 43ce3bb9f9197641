"""Programs run in this process, or in those of a crew, where one of their own would show nothing more: most of what a
short run takes is the import of the library, and of what draws."""

import contextlib
import io
import os
import runpy
import sys
from dataclasses import dataclass

from minitorch_dist import comm
from minitorch_dist.comm.state import state


@dataclass
class Ended:
    """What `python file arguments…` would have left: its status and what it said."""

    status: int
    stdout: str
    stderr: str


def run(file, *arguments):
    """Run a program's file as __main__; an Ended. What it raises, but for SystemExit, comes out."""
    out, err, before = io.StringIO(), io.StringIO(), (sys.argv, list(sys.path))
    try:
        sys.argv = [str(file), *map(str, arguments)]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(file), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv, sys.path[:] = before
    return Ended(status, out.getvalue(), err.getvalue())


@dataclass
class RankEnded(Ended):
    """And how many blocking calls the rank has begun."""

    calls: int


def as_rank(file, arguments, variables):
    """What a rank of a crew does for crews.launch. The world's algorithm is the program's to choose."""
    world, before = comm.world(), {name: os.environ.get(name) for name in variables}
    algorithm = world.algorithm
    os.environ.update(variables)
    try:
        ended = run(file, *arguments)
    finally:
        world.algorithm = algorithm
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return RankEnded(ended.status, ended.stdout, ended.stderr, state.calls)
