"""The command line: `python -m minitorch_dist COMMAND`, or `minitorch-dist COMMAND` where the package is installed."""

import sys

from . import __version__, doctor, supervise, viz
from .kernels import show
from .parallel.pipelines import schedule_command
from .plan import command
from .program import Sections, one_process, reader_may_leave


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
    with reader_may_leave():
        return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
