"""The command line: `python -m minitorch_dist COMMAND`, or `minitorch-dist COMMAND` where the package is installed."""

import os
import sys

from . import __version__, doctor, supervise, viz
from .kernels import show
from .parallel.pipelines import schedule_command
from .plan import command
from .program import Sections, one_process


def main(argv=None):
    """Run one command; returns the exit status."""
    parser = Sections(prog="minitorch-dist", description="Tools beside the framework.")
    parser.add_argument("--version", action="version", version=f"minitorch_dist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    doctor.add_command(commands)
    show.add_command(commands)
    schedule_command.add_command(commands, draw=viz.schedule)
    command.add_command(commands)
    supervise.add_command(commands)
    args = parser.parse_args(argv)
    if args.command != "doctor":        # who may look at several machines
        one_process(f"minitorch-dist {args.command}")
    try:
        status = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:     # whoever reads, as `| head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # for Python's own flush at the end
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
