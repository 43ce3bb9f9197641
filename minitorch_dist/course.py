"""`minitorch-exercises`: the course of the checkout that this directory lies in, from any directory of it."""

import runpy
import sys
from pathlib import Path


def find(start):
    """The nearest folder, upwards from `start`, that holds the course. None if there is none."""
    start = Path(start).resolve()
    return next((folder for folder in (start, *start.parents)
                 if (folder / "exercises" / "frame" / "course.py").is_file()), None)


def main():
    """Run the course's own command line; its exit status."""
    root = find(Path.cwd())
    if root is None:
        sys.exit(f"no course here: {Path.cwd()} and the folders above it hold no exercises/. Change into a checkout of "
                 "minitorch_dist")
    sys.path.insert(0, str(root))
    runpy.run_module("exercises", run_name="__main__", alter_sys=True)
