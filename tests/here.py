"""Programs run in this process, where one of their own would show nothing more: most of what a short run takes is the
import of the library, and of what draws."""

import contextlib
import io
import runpy
import sys
from dataclasses import dataclass


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
