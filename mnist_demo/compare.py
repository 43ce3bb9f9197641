"""Are these runs one curve? Draws their losses into one picture and says so.

    python mnist_demo/compare.py runs/demo-1 runs/demo-2 -o runs/curves.png

Each RUN is a folder that train.py wrote with --out; the first is the reference.
Exit status: 0 identical or within the tolerance, 1 DIFFERENT, 2 the runs cannot be compared.
"""

import argparse
import sys

from minitorch_dist import program, viz

# The table: heading, and how to write the run's summary under it.
COLUMNS = {
    "ranks": lambda s: f"{s['ranks']}",
    "data": lambda s: f"{s['data']}",
    "test accuracy": lambda s: f"{s['test_accuracy']:.2f} %",
    "samples/s": lambda s: f"{s['samples_per_second']:,.0f}",
    "MB sent per rank": lambda s: f"{s['bytes_sent_per_rank'] / 1e6:,.1f}",
    "peak memory": lambda s: f"{s['peak_memory_bytes'] / 1e6:,.0f} MB",
}


def cell(write, summary):
    """One cell; a dash where the summary lacks the value."""
    try:
        return write(summary)
    except (KeyError, TypeError, ValueError):
        return "-"


def table(runs):
    """The runs' summaries as aligned lines of text."""
    rows = [["run", *COLUMNS], *([run.name, *(cell(write, run.summary) for write in COLUMNS.values())] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.rjust(width) if index else text.ljust(width)
                               for index, (text, width) in enumerate(zip(row, widths, strict=True))) for row in rows)


def tolerance(text):
    """A tolerance from the command line: a number, 0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a tolerance: give a number such as 1e-4, 0 or more")
    return value


def main(argv=None):
    """Compare the runs named on the command line; returns the exit status."""
    program.one_process("compare.py")
    description, _, details = __doc__.partition("\n\n")
    parser = program.Sections(description=description, epilog=details,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run; the first is the reference")
    parser.add_argument("-o", "--output", default="runs/curves.png", metavar="FILE.png", help="default: %(default)s")
    parser.add_argument("--tolerance", type=tolerance, default=1e-4, metavar="T",
                        help="largest |Δloss| that still counts as one curve (default: %(default)g)")
    args = parser.parse_args(argv)
    try:
        runs = [viz.read_run(folder) for folder in args.runs]
        verdict = viz.verdict(runs, args.tolerance)
        print(f"{table(runs)}\n\n{verdict.text}")
        viz.curves(runs, args.output, args.tolerance)
    except ImportError as error:
        print(f"No picture: {error}. Install what draws it: pip install -e '.[demo]'", file=sys.stderr)
        return 2
    except BrokenPipeError:     # no fault of the runs
        raise
    except (OSError, ValueError) as error:
        print(program.in_words(error), file=sys.stderr)
        return 2
    print(args.output)
    return 1 if verdict.kind == "different" else 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
