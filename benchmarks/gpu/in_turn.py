"""Everything that wants a GPU, the most important first, on a machine that is lent by the minute: each part a process
of its own with a limit, what it printed and measured kept as soon as it ends.

    python benchmarks/gpu/in_turn.py --minutes 9 --out FOLDER               # all, as far as the time goes
    python benchmarks/gpu/in_turn.py --minutes 4 --out FOLDER gpt2 lenet    # of the parts those that are named
    python benchmarks/gpu/in_turn.py --list                                 # which parts there are

FOLDER/brought.tar.gz has benchmarks/results/gpu_*.json and runs/, with what each part printed and the GPU's clocks in
runs/logs: unpack it where they belong. A folder kit/ in the current one, made by kit.py, is used: its wheels are
installed, its machine code is found. The last part may take 20 seconds more than are left: to say what it knows.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from minitorch_dist.tables import aligned  # noqa: E402

KIT = "kit"
LAST, MORE = 8, 30      # lines of a log that are shown, and of a part that fails
GRACE = 20      # seconds that a part whose time is over has to say what it knows: pytest then shows what has failed
CLOCKS = ["nvidia-smi", "--format=csv", "--loop=2", "--query-gpu=timestamp,name,clocks.sm,clocks.mem,temperature.gpu,"
          "power.draw,utilization.gpu,memory.used,clocks_event_reasons.active"]


class Part(NamedTuple):
    """name, how long it is likely to take and how long it may (seconds), what is run in bash, and what that shows.
    (The likely ones are guesses for an H100 or H200 with 16 cores, kernels compiled already.)"""

    name: str
    likely: int
    limit: int
    command: str
    shows: str


PARTS = (
    Part("doctor", 15, 60, "nvidia-smi; nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,ECC; lscpu; {python} -m pip list; "
         "{python} -m minitorch_dist doctor", "whether driver, CuPy, Triton and MPI fit together; versions"),
    Part("adam", 45, 150, "{python} benchmarks/gpu/adam.py", "GB/s, and torch's Adam; state of 8 bits"),
    Part("tests", 240, 420,
         "TRITON_INTERPRET=0 {python} -m pytest -q -rsfE -m gpu -n 12 --durations=15 -o faulthandler_timeout=120 "
         "tests/kernels tests/device",
         "the op table, kernels, models, graphs and shared GPUs against the host"),
    Part("again", 5, 150, "{python} benchmarks/gpu/again.py", "the tests that have failed, each alone"),
    Part("gpt", 60, 150, "{python} benchmarks/gpu/train.py gpt", "a small GPT's step beside torch's"),
    Part("fused", 30, 90, "{python} benchmarks/gpu/kernels.py fused", "softmax cross-entropy and layer norm"),
    Part("gpt2", 90, 180, "{python} benchmarks/gpu/train.py gpt2", "GPT-2's size: the GPU is the slower one there"),
    Part("mlp", 45, 120, "{python} benchmarks/gpu/train.py mlp", "an MLP's step"),
    Part("lenet", 60, 150, "{python} benchmarks/gpu/train.py lenet", "LeNet's step"),
    Part("attention", 20, 90, "{python} benchmarks/gpu/kernels.py attention", "flash attention beside torch's two"),
    Part("products", 20, 90, "{python} benchmarks/gpu/kernels.py products", "our matrix products beside cuBLAS"),
    Part("loss", 20, 60, "{python} benchmarks/gpu/kernels.py loss", "a loss by tiles, and of all logits"),
    Part("curves", 60, 120,
         "{python} mnist_demo/train.py --data digits --steps 50 --out runs/cpu && "
         "{python} mnist_demo/train.py --data digits --steps 50 --device cuda --out runs/gpu && "
         "mpirun -n 2 {python} mnist_demo/train.py --data digits --steps 50 --device cuda --out runs/gpu-2 && "
         "{python} mnist_demo/compare.py runs/cpu runs/gpu runs/gpu-2 -o runs/curves.png",
         "one curve: the host's, a GPU's, that of two ranks that share it"),
    Part("thresholds", 90, 200, "{python} benchmarks/gpu/kernels.py thresholds", "from which size each kernel wins"),
)


def environment(kit):
    """What the parts run in: they find this checkout, which nobody has installed, the kit's machine code and mpirun."""
    first = {"PATH": f"{sys.prefix}/bin", "PYTHONPATH": str(ROOT)}
    found = {name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in first.items()}
    found |= {"XDG_CACHE_HOME": str(kit / "cache")} if kit.is_dir() else {}
    return os.environ | found | {"PYTHONUNBUFFERED": "1"}


def install(kit):
    """The kit's wheels go into the Python that runs: mpi4py looks for an MPI beside it. Says so if they can't."""
    wheels = sorted(map(str, kit.glob("wheels/*.whl")))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", *wheels]
    if wheels and subprocess.run(command).returncode:
        print("the kit's wheels can't be installed here: tests with several ranks will be skipped", flush=True)


def run(part, seconds, log, env):
    """Run a part for so many seconds, and GRACE: how it ended, in words. All that it has started ends with it."""
    with open(log, "w") as out:
        process = subprocess.Popen(["bash", "-c", part.command.format(python=sys.executable)], cwd=ROOT, env=env,
                                   stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            status = process.wait(seconds)
            return "done" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
                process.wait(GRACE)
            return f"ended after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)      # ranks and compilers that it has left
            process.wait()


@contextlib.contextmanager
def clocks(path):
    """Meanwhile the GPU's clocks are written down: whether it was throttled where a figure is low."""
    if shutil.which(CLOCKS[0]) is None:
        yield
        return
    with open(path, "a") as out, subprocess.Popen(CLOCKS, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as process:
        try:
            yield
        finally:
            process.terminate()


def pack(folder):
    """What is there so far, in one file, which is never half written."""
    fresh = folder / "brought.tar.gz.new"
    with tarfile.open(fresh, "w:gz") as tar:
        for path in [*ROOT.glob("benchmarks/results/gpu_*.json"), *ROOT.glob("runs/*")]:
            if path.absolute() != folder:
                tar.add(path, path.relative_to(ROOT))
    fresh.replace(folder / "brought.tar.gz")


def in_turn(parts, minutes, folder, kit):
    """Run the parts until the time is over: [(name, how it ended, seconds)]. One that isn't likely to end is left out,
    for a shorter one behind it."""
    end, rows, logs = time.monotonic() + 60 * minutes, [], ROOT / "runs" / "logs"
    for each in (folder, logs):
        each.mkdir(parents=True, exist_ok=True)
    install(kit)
    with clocks(logs / "clocks.csv"):
        for part in parts:
            begin = time.monotonic()
            if begin + part.likely > end:
                rows.append((part.name, f"left out: {max(0, end - begin):.0f} s were left of {part.likely}", ""))
                continue
            print(f"\n--- {time.strftime('%T')} {part.name}: {part.shows}", flush=True)
            log = logs / f"{part.name}.log"
            how = run(part, min(part.limit, end - begin), log, environment(kit))
            rows.append((part.name, how, f"{time.monotonic() - begin:.0f}"))
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(lines[-(LAST if how == "done" else MORE):]), flush=True)
            print(f"--- {part.name}: {how}", flush=True)
            pack(folder)
    return rows


def main():
    """The command line; status 1 where a part failed or was left out."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"among {', '.join(names)}; all by default")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/lent"))
    parser.add_argument("--list", action="store_true")
    given, more = parser.parse_known_args()
    if unknown := [*more, *(name for name in given.parts if name not in names)]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; choose among {', '.join(names)}")
    if given.list:
        print("\n".join(aligned([("part", "what it shows", "likely s", "limit s"), *(
            (p.name, p.shows, str(p.likely), str(p.limit)) for p in PARTS)], left=2)))
        return
    rows = in_turn([p for p in PARTS if p.name in (given.parts or names)], given.minutes, given.out.absolute(),
                   Path(KIT).absolute())
    print("\n" + "\n".join(aligned([("part", "how it ended", "s"), *rows], left=2)))
    print(f"\nbring back {given.out / 'brought.tar.gz'}")
    if left := [name for name, how, _ in rows if how.startswith("left out")]:
        print(f"then, for the rest: python benchmarks/gpu/in_turn.py --minutes {given.minutes:g} --out {given.out} "
              f"{' '.join(left)}")
    sys.exit(any(how != "done" for _, how, _ in rows))


if __name__ == "__main__":
    main()
