"""All-reduce of 1 KiB to 64 MiB on 2 and on 4 ranks: our engines and algorithms, MPI's own, and torch's gloo.

    python benchmarks/comm.py           # starts mpirun itself, writes results/comm.json and results/comm.png
    python benchmarks/comm.py --draw    # the picture alone, from results/comm.json

Everything is measured in turns in one job; the time of a turn is that of the slowest rank. The costs α, β, γ of one
message, one byte and one addition are then fitted to the times of the algorithms, and say who should win where.
"""

import os
import sys

from _harness import HERE, RESULTS, Report, installed, join_gloo, named, one_thread

one_thread()

import gc  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402

from minitorch_dist import comm  # noqa: E402
from minitorch_dist.comm import cost  # noqa: E402
from minitorch_dist.comm.algorithms import ALGORITHMS  # noqa: E402
from minitorch_dist.testing import ranks  # noqa: E402

SIZES = [1 << k for k in range(10, 27, 2)]
TURN, ROUNDS, SOME_ROUNDS, FEW_ROUNDS = 0.003, 60, 25, 8    # short turns: some find the machine quiet
MANY_BYTES = 4 << 20
LIMIT = 900
COLORS = ("#1d3557", "#2a9d8f", "#9b2c8f", "#b08900", "#6c757d", "#b3261e", "#f4a259")
WINDOW, BARE, GLOO = "window", "MPI, bare", "torch gloo"


def contenders(world, unchecked, nbytes, skipped):
    """{name: a function that reduces an array of that many bytes}."""
    from mpi4py import MPI
    bare = MPI.COMM_WORLD.Dup()

    def plain():
        return np.zeros(nbytes // 4, np.float32)
    in_window, in_window_too = world.empty(nbytes // 4, "f4"), unchecked.empty(nbytes // 4, "f4")
    x, y, z = plain(), plain(), plain()
    functions = {
        BARE: lambda: bare.Allreduce(MPI.IN_PLACE, y),
        WINDOW: lambda: world.all_reduce(in_window),
        "window, unchecked": lambda: unchecked.all_reduce(in_window_too),
        "MPI, ours": lambda: world.all_reduce(x),
        "MPI, ours, unchecked": lambda: unchecked.all_reduce(z),
    }
    for name in ALGORITHMS:
        functions[name] = lambda name=name: world.all_reduce(x, algorithm=name)
    if installed(skipped, "torch"):
        import torch
        import torch.distributed as dist
        tensor = torch.zeros(nbytes // 4)
        functions[GLOO] = lambda: dist.all_reduce(tensor)
    return functions


def turn(function, count, world):
    """Seconds per call of the slowest rank, over `count` of them after one that isn't counted."""
    function()
    world.barrier()
    start = time.perf_counter()
    for _ in range(count):
        function()
    taken = np.array([(time.perf_counter() - start) / count])
    world.all_reduce(taken, "max", algorithm="mpi")
    return float(taken[0])


def measure(world, unchecked, nbytes, skipped):
    """{name: seconds of the best turn}."""
    functions = contenders(world, unchecked, nbytes, skipped)
    counts = {name: max(2, min(2000, round(TURN / min(turn(function, 2, world), turn(function, 2, world)))))
              for name, function in functions.items()}
    turns = {name: [] for name in functions}
    gc.disable()
    rounds = ROUNDS if world.size <= (os.cpu_count() or 1) else SOME_ROUNDS
    for _ in range(rounds if nbytes < MANY_BYTES else FEW_ROUNDS):
        for name, function in functions.items():
            turns[name].append(turn(function, counts[name], world))
    gc.enable()
    return {name: min(times) for name, times in turns.items()}


def on_ranks(path):
    """What each rank does: measure everything, and rank 0 writes {size: {name: seconds}}."""
    os.environ.pop("MINITORCH_RANK_STATE", None)     # writing down every call takes longer than a small reduction
    world = comm.world()
    os.environ["MINITORCH_CHECK"] = "0"
    unchecked = world.split(0)
    skipped = {}
    if installed(skipped, "torch"):
        join_gloo(world)
    seconds = {nbytes: measure(world, unchecked, nbytes, skipped) for nbytes in SIZES}
    if world.rank == 0:
        with open(path, "w") as file:
            json.dump({"seconds": seconds, "skipped": skipped}, file)
    world.barrier()


# ---------------------------------------------------------------- reports

def text_of(nbytes):
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def fitted(seconds, n):
    return cost.fit([(name, n, nbytes, times[name]) for nbytes, times in seconds.items() for name in ALGORITHMS])


def report_on(n, seconds, report):
    """The tables of n ranks, and what was aimed for."""
    report.table(f"µs per all-reduce, {n} ranks", [
        {"bytes": text_of(nbytes), **{name: f"{1e6 * t:.1f}" for name, t in times.items()}}
        for nbytes, times in seconds.items()])
    rows = []
    costs = fitted(seconds, n)
    for nbytes, times in seconds.items():
        best = min(ALGORITHMS, key=times.get)
        predicted = cost.fastest(n, nbytes, costs)
        rows.append({"bytes": text_of(nbytes), "window against MPI": f"{times[BARE] / times[WINDOW]:.2f} ×",
                     "window against gloo": f"{times[GLOO] / times[WINDOW]:.1f} ×" if GLOO in times else "",
                     "check, window (µs)": f"{1e6 * (times[WINDOW] - times['window, unchecked']):.2f}",
                     "check, MPI (µs)": f"{1e6 * (times['MPI, ours'] - times['MPI, ours, unchecked']):.2f}",
                     "fastest to read": best, "predicted": predicted,
                     "predicted / measured": f"{cost.predict(predicted, n, nbytes, costs) / times[predicted]:.2f}"})
    report.table(f"{n} ranks; the model's α = {1e6 * costs.alpha:.1f} µs a message, β = {1e9 * costs.beta:.2f} and "
                 f"γ = {1e9 * costs.gamma:.2f} ns a byte", rows)
    for least, factor in ((4 << 10, 1.0), (256 << 10, 2.5)):
        worst = min(times[BARE] / times[WINDOW] for nbytes, times in seconds.items() if nbytes >= least)
        report.aim(f"{n} ranks: window against MPI's own, from {text_of(least)}", f"≥ {factor:g} ×", f"{worst:.2f} ×",
                   worst >= factor)
    if n > (os.cpu_count() or 1):     # a meeting of more ranks than cores is a matter of the scheduler
        return
    small = [times for nbytes, times in seconds.items() if nbytes <= 64 << 10]
    for kind in (WINDOW, "MPI, ours"):
        checks = np.median([1e6 * (times[kind] - times[f"{kind}, unchecked"]) for times in small])
        report.aim(f"{n} ranks: mismatch check, {kind}, up to 64 KiB", "≤ 3 µs", f"{checks:.2f} µs", checks <= 3)


def draw(content, path):
    """Measured points, predicted lines, one panel for each number of ranks."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(content), sharey=True, squeeze=False)[0]
    colors = dict(zip([*ALGORITHMS, BARE, WINDOW, GLOO], COLORS, strict=True))
    for axes, (n, seconds) in zip(panels, content.items(), strict=True):
        costs = fitted(seconds, n)
        for name, color in colors.items():
            points = [(nbytes, 1e6 * times[name]) for nbytes, times in seconds.items() if name in times]
            if not points:
                continue
            label = name.replace("_", " ")
            axes.plot(*zip(*points, strict=True), "o" if name in ALGORITHMS else "s--", color=color, ms=4.5, lw=1.2,
                      label=label)
            if name in ALGORITHMS:
                line = [1e6 * cost.predict(name, n, nbytes, costs) for nbytes in seconds]
                axes.plot(list(seconds), line, color=color, lw=1.4, alpha=0.8)
        for nbytes, times in seconds.items():
            best = min((name for name in colors if name in times and name in ALGORITHMS), key=times.get)
            axes.axvspan(nbytes / 2, nbytes * 2, ymax=0.025, color=colors[best], lw=0)
        axes.set(xscale="log", yscale="log", xlabel="bytes", title=f"{n} ranks")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(seconds)[::2], [text_of(nbytes) for nbytes in list(seconds)[::2]])
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("µs per all-reduce")
    panels[0].legend(frameon=False, fontsize=9, title="points: measured; lines: α-β-γ model", title_fontsize=9)
    figure.suptitle("All-reduce: who is fastest at which length (bottom band: the fastest of the four to read)",
                    fontsize=11)
    figure.savefig(path)
    print(f"written to {path.relative_to(HERE.parent)}")


def main(flags):
    """Measure on 2 and on 4 ranks, report, and draw where matplotlib is installed."""
    result = RESULTS / "comm.json"
    if "--draw" not in flags:
        report, content = Report("comm", "All-reduce (`comm.py`)"), {}
        for n in (2, 4):
            part = RESULTS / f".comm-{n}.json"
            ranks.launch([__file__, "--rank", part], n, limit=LIMIT).check()
            measured = json.loads(part.read_text())
            part.unlink()
            content[n] = {int(nbytes): times for nbytes, times in measured["seconds"].items()}
            report.skipped |= measured["skipped"]
            report_on(n, content[n], report)
        report.save()
        saved = json.loads(result.read_text())
        result.write_text(json.dumps(saved | {"seconds": content}, indent=1, ensure_ascii=False) + "\n")
    content = {int(n): {int(nbytes): times for nbytes, times in seconds.items()}
               for n, seconds in json.loads(result.read_text())["seconds"].items()}
    try:
        draw(content, RESULTS / "comm.png")
    except ImportError:
        print("no picture: matplotlib isn't installed here; python benchmarks/comm.py --draw draws it elsewhere")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        on_ranks(sys.argv[-1])
    else:
        main(sys.argv[1:] and named(__doc__, ["--draw"]))
