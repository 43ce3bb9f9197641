"""How long a training stands still for a checkpoint: one that it waits for, and one that a thread writes beside it.

    python benchmarks/checkpoints.py

One process, a stack of layers with Adam: 12 bytes per parameter. "stands still" is the time of the call; "until on
disk" that from the call until all is there, while steps go on in between: products of matrices in NumPy, the same for
all, compared with such steps when nothing is written. Beside torch's distributed checkpoint (DCP), its `save` and
`async_save`; both libraries sync their files to the disk.
"""

import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

from _harness import Report, installed, named, one_thread

one_thread()

import numpy as np  # noqa: E402

from minitorch_dist import checkpoints, nn, optim  # noqa: E402

WIDTHS = (1024, 2048, 2048, 2048, 1024)
ROUNDS = 7
AIM = 0.5       # of the time of a checkpoint that is waited for
RIVAL_AIM = 1.0     # torch's async_save stands still so many times as long


def ours(folder):
    """{name: begin(number)}, each of which begins a save and returns what waits for it."""
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)])
    optimizer = optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = np.ones_like(p.numpy())
    optimizer.step()

    def wait(number):
        checkpoints.save(folder / f"wait-{number}", model, optimizer)
        return lambda: None

    def beside(number):
        return checkpoints.save(folder / f"beside-{number}", model, optimizer, async_op=True).wait
    count = sum(p.size for p in model.parameters())
    return {"ours, waited for": wait, "ours, async_op": beside}, 12 * count


def torchs(folder):
    """The same by torch's DCP; in a process group of one, which its async_save wants."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)])
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def wait(number):
        dcp.save(state(), checkpoint_id=folder / f"torch-wait-{number}")
        return lambda: None

    def beside(number):
        return dcp.async_save(state(), checkpoint_id=folder / f"torch-beside-{number}").result
    return {"torch, DCP save": wait, "torch, DCP async_save": beside}


def steps(waits):
    """Steps of a small training until waits() says so: [seconds of each]."""
    x, w = np.ones((64, 1024), np.float32), np.ones((1024, 1024), np.float32) / 1024
    took = []
    while not waits():
        begin = time.perf_counter()
        for _ in range(4):
            x = np.tanh(x @ w)
        took.append(time.perf_counter() - begin)
    return took


def main():
    report = Report("checkpoints", "Checkpoints (`checkpoints.py`)")
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        found = measure(report, Path(folder))
    still = {name: min(times["still"]) for name, times in found.items()}
    report.aim("async_op stands still, of the save that is waited for", f"≤ {AIM} ×",
               f"{still['ours, async_op'] / still['ours, waited for']:.2f} ×",
               still["ours, async_op"] <= AIM * still["ours, waited for"])
    if "torch" not in report.skipped:
        ratio = still["torch, DCP async_save"] / still["ours, async_op"]
        report.aim("torch's async_save stands still, of ours", f"≥ {RIVAL_AIM} ×", f"{ratio:.2f} ×", ratio >= RIVAL_AIM)
    report.save()


def measure(report, folder):
    """{name: {"still", "done", "steps": seconds of each round}}, in turns, and their table."""
    programs, nbytes = ours(folder)
    if installed(report.skipped, "torch"):
        programs |= torchs(folder)
    found = {name: {"still": [], "done": [], "steps": []} for name in programs}
    quiet = []
    for number in range(ROUNDS):
        for name, begin in programs.items():
            os.sync()
            until = time.perf_counter() + 0.2
            quiet += steps(lambda until=until: time.perf_counter() > until)
            start = time.perf_counter()
            wait = begin(number)
            found[name]["still"].append(time.perf_counter() - start)
            found[name]["steps"] += beside(wait)
            found[name]["done"].append(time.perf_counter() - start)
            for path in folder.iterdir():
                shutil.rmtree(path)
    usual = statistics.median(quiet)
    report.table(f"a checkpoint of {nbytes / 1e6:,.0f} MB, one process, ms; best of {ROUNDS}", [
        {"": name, "stands still": f"{1e3 * min(times['still']):.0f}",
         "median": f"{1e3 * statistics.median(times['still']):.0f}",
         "until on disk": f"{1e3 * min(times['done']):.0f}",
         "a step meanwhile": f"{statistics.median(times['steps']) / usual:.2f} ×" if times["steps"] else ""}
        for name, times in found.items()])
    return found


def beside(wait):
    """Steps until wait() has returned, in a thread of its own."""
    thread = threading.Thread(target=wait)
    thread.start()
    took = steps(lambda: not thread.is_alive())
    thread.join()
    return took


if __name__ == "__main__":
    named(__doc__)
    main()
