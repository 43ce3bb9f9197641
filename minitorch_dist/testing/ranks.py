"""The one launcher of N ranks: with a time limit, and for each rank its output, its last state and its stack.

    run = ranks.launch(["train.py", "--steps", "3"], n=2, limit=60).check()
    values = ranks.call("tests.comm.cases:sum_of_ranks", n=4)      # [value of rank 0, value of rank 1, …]

A launch costs about 0.3 s and the imports. A run that takes longer than its limit is ended and has failed, whatever
it has printed; the report then says where each rank waited.
"""

import contextlib
import functools
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from minitorch_dist.comm.state import read_state
from minitorch_dist.launch_env import without_launcher

CHILD = Path(__file__).with_name("rank_child.py")
TAIL_LINES = 40       # of each rank's output in a report
STACK_SECONDS = 0.3   # for the ranks to dump their stacks
END_SECONDS = 1       # for mpirun to end its ranks before they are killed
GONE_SECONDS = 1      # for the killed to go
LOOK_EVERY = 0.05     # seconds between two looks at the ranks' states
VERSION_SECONDS = 10  # for mpirun to say which one it is
LOOKED_SECONDS = 0.3  # of CPU time, of a rank that looks again and again for what it waits for

# What a program needs to start at all: all that `inherit=False` leaves of the environment.
NEEDED = ("PATH", "HOME", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "SYSTEMROOT")      # HOME: else Open MPI gives up
NEEDED_PREFIXES = ("LC_", "OMPI_MCA_", "OMPI_ALLOW_", "PRTE_", "MPICH_", "FI_", "UCX_")

# Each rank writes into files of its own; $0 is the folder. `exec` keeps the pid, so that the launcher knows it.
PER_RANK = ('rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}}; echo $$ > "$0/rank-$rank.pid"; '
            'exec "$@" > "$0/rank-$rank.out" 2> "$0/rank-$rank.err"')


@dataclass
class Run:
    """What came of a launch. Lists are indexed by rank.

    returncode       of the launcher (of python itself for a plain run); None after a timeout
    timed_out        True if the limit was reached
    seconds          wall time
    stdout, stderr   text
    state            dict of the rank's last blocking call (comm/state.py), None if it never reached comm.world()
    stack            after a timeout, the stacks of the rank's threads
    launcher_stderr  what mpirun itself printed, on stdout too
    started          whether mpirun has started a rank at all
    quiet            of a launch with `still`: seconds since a rank last began a call or came out of one, when it ended;
                     inf where all stood still, and where nobody has looked
    """

    command: list
    returncode: int | None
    timed_out: bool
    seconds: float
    stdout: list
    stderr: list
    state: list
    stack: list
    launcher_stderr: str
    started: bool = True
    quiet: float = math.inf

    def check(self):
        """self, if the run ended in time with status 0; else AssertionError with all that is known."""
        if self.timed_out or self.returncode != 0:
            raise AssertionError(self.report())
        return self

    def report(self):
        """Everything a human needs to see what went wrong."""
        ending = "reached its time limit" if self.timed_out else f"ended with status {self.returncode}"
        lines = [f"{' '.join(map(str, self.command))}", f"{ending} after {self.seconds:.1f} s"
                 + ": the launcher has started no rank" * (not self.started)]
        for rank in range(len(self.stdout)):
            lines += [f"---- rank {rank}: {self._where(rank)}"]
            for title, text in (("stack", self.stack[rank]), ("stderr", self.stderr[rank]),
                                ("stdout", self.stdout[rank])):
                if text.strip():
                    lines += [f"  {title}:"] + ["    " + line for line in text.rstrip().splitlines()[-TAIL_LINES:]]
        if self.launcher_stderr.strip():
            lines += ["---- launcher:"] + ["    " + line for line in self.launcher_stderr.splitlines()[-TAIL_LINES:]]
        return "\n".join(lines)

    def _where(self, rank):
        state = self.state[rank]
        if state is None:
            return "never came to comm.world()"
        if not state["waiting"]:
            return f"between calls, after {state['calls']} of them"
        detail = ", ".join(f"{key} {state[key]}" for key in ("dtype", "shape", "peer") if state.get(key) is not None)
        return f"in call {state['calls']}, {state['op']} on {state['axis']!r}" + (f" ({detail})" if detail else "")


def launch(arguments, n, limit=60, env=None, cwd=None, force=False, inherit=True, still=None):
    """Run `mpirun -n N python *arguments`; a Run. One rank runs without mpirun, unless `force`.

    limit    seconds
    env      variables added to this process's own; those of a launcher above it are left out
    inherit  False: of this process's own only those that a program needs to start
    still    seconds after which the run is ended, as if at its limit, when all ranks have waited in one and the same
             call for so long: they wait for each other. It is ended before, when each has spent LOOKED_SECONDS of CPU
             time in that call: on a busy machine too, what was sent has arrived by then
    """
    with _folder() as folder:
        return Launch(folder, arguments, n, env, cwd, force, inherit).finish(limit, still)


def call(target, n, args=(), limit=60, env=None, cwd=None):
    """Call `module:function` with args on each of n ranks, after comm.world(); the list of their values, by rank.

    Arguments and values are pickled. Modules are found where this process finds them. A function that raises, a rank
    that ends early and a timeout are AssertionErrors with the traceback.
    """
    with _folder() as folder:
        with open(folder / "call.pickle", "wb") as file:
            pickle.dump([os.path.abspath(path) for path in sys.path], file)
            pickle.dump((target, tuple(args)), file)
        run = Launch(folder, [CHILD, folder], n, env, cwd).finish(limit).check()
        files = [folder / f"rank-{rank}.value" for rank in range(n)]
        if missing := [rank for rank in range(n) if not files[rank].exists()]:
            raise AssertionError(f"{target}: no value from ranks {missing}\n{run.report()}")
        return [pickle.loads(file.read_bytes()) for file in files]


def clean():
    """Of this process's environment what a program needs to start at all."""
    return {name: value for name, value in without_launcher(os.environ).items()
            if name in NEEDED or name.startswith(NEEDED_PREFIXES)}


def find_mpirun():
    """Path of mpirun: the one beside this python, else the first on PATH. RuntimeError if there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    found = beside if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise RuntimeError("no mpirun beside this python nor on PATH: `pip install mpich`, or install your cluster's "
                           "MPI and load its module")
    return found


def is_alive(pid):
    """Whether there is such a process that runs, or could; a zombie, of which only its entry is left, can't."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:       # the name in it need not be text
            return stat.read().rsplit(b")", 1)[1].split()[0] != b"Z"
    except FileNotFoundError:
        return not os.path.exists("/proc/self/stat") and _signal(pid, 0)     # no /proc on this system
    except ProcessLookupError:      # it went while being read
        return False


def mpirun_command():
    """mpirun with the options that let it start any number of ranks on this machine, as any user. RuntimeError where
    there is none, or none that can be run."""
    return _with_options(find_mpirun())


@functools.cache
def _with_options(mpirun):
    try:
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                                 timeout=VERSION_SECONDS).stdout
    except OSError as error:
        raise RuntimeError(f"{mpirun} can't be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`{mpirun} --version` has said nothing for {VERSION_SECONDS} s: this MPI hangs") from None
    if "Open MPI" not in version and "OpenRTE" not in version and "prte" not in version.lower():
        return [mpirun]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, "--oversubscribe", "--bind-to", "none", *root]


# ---------------------------------------------------------------- inside

@contextlib.contextmanager
def _folder():
    """What a launch and its ranks tell each other by: a folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Launch:
    """Ranks under way. `finish` ends them, and gives the Run."""

    def __init__(self, folder, arguments, n, env=None, cwd=None, force=False, inherit=True):
        self.folder, self.n = folder, n
        mpirun = [*mpirun_command(), "-n", str(n)] if n > 1 or force else []
        python = [sys.executable, *map(str, arguments)]
        self.command = [*mpirun, *python]
        environment = (without_launcher(os.environ) if inherit else clean()) | {
            "MINITORCH_RANK_STATE": str(folder), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"} | (env or {})
        self.start = time.monotonic()
        # MPICH's mpirun names the signal that killed a rank on stdout.
        with open(folder / "launcher.err", "w") as said:
            self.process = subprocess.Popen([*mpirun, "/bin/sh", "-c", PER_RANK, str(folder), *python], cwd=cwd,
                                            env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                                            start_new_session=True)

    def finish(self, limit, still=None):
        """Wait for the end, at most `limit` seconds; the Run."""
        try:
            quiet = _wait(self.process, self.folder, self.n, limit, still)
            timed_out = False
        except subprocess.TimeoutExpired as error:
            timed_out, quiet = True, error.timeout
            _dump_stacks(self.folder, self.n)
        finally:
            _end(self.process, self.folder, self.n)
        seconds = time.monotonic() - self.start

        def texts(kind):
            return [_read(self.folder / f"rank-{rank}.{kind}") for rank in range(self.n)]
        return Run(self.command, None if timed_out else self.process.returncode, timed_out, seconds, texts("out"),
                   texts("err"), _states(self.folder, self.n), texts("stack"), _read(self.folder / "launcher.err"),
                   any(_pids(self.folder, self.n)), quiet)


def _states(folder, n):
    return [read_state(folder / f"rank-{rank}.state") for rank in range(n)]


def _wait(process, folder, n, limit, still):
    """Wait for the end; Run.quiet. TimeoutExpired, with that, at the limit, or when all ranks have stood still."""
    if still is None:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(process.args, math.inf) from None
        return math.inf
    changed = since = time.monotonic()
    end, seen, spent = since + limit, [None] * n, [0] * n
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_EVERY)
            return time.monotonic() - changed
        states, now = _states(folder, n), time.monotonic()
        changed = now if states != seen else changed
        if states != seen or not all(state is not None and state["waiting"] for state in states):
            seen, since, spent = states, now, _cpu_seconds(states)
        looked = all(new - old > LOOKED_SECONDS for new, old in zip(_cpu_seconds(seen), spent, strict=True))
        if now - since > still or looked:
            raise subprocess.TimeoutExpired(process.args, math.inf)
        if now > end:
            raise subprocess.TimeoutExpired(process.args, now - changed)


def _cpu_seconds(states):
    """What each rank's main thread has spent, by Linux's clock of 1/100 s; 0 where nobody tells."""
    return [_cpu_seconds_of(state and state["pid"]) for state in states]


def _cpu_seconds_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/stat") as stat:
            return sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0


def _read(path):
    return path.read_text(errors="replace") if path.exists() else ""


def _pids(folder, n):
    texts = [_read(folder / f"rank-{rank}.pid").strip() for rank in range(n)]
    return [int(text) if text else None for text in texts]


def _dump_stacks(folder, n):
    """Have every rank that has armed it (it has a state file) write its stacks; see comm/state.py."""
    for rank, pid in enumerate(_pids(folder, n)):
        if pid is not None and (folder / f"rank-{rank}.state").exists():
            _signal(pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)


def _end(process, folder, n):
    """End what is left of a run: mpirun ends its ranks when asked to, and whoever is left then is killed."""
    if process.poll() is not None:
        return
    pids = _pids(folder, n)
    _signal(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    limit = time.monotonic() + GONE_SECONDS
    # mpirun starts each rank in a session of its own, so that killing its own group doesn't reach them.
    while pids and time.monotonic() < limit:
        pids = [pid for pid in pids if pid is not None and _signal(pid, signal.SIGKILL) and is_alive(pid)]
        time.sleep(0.01)


def _signal(pid, number):
    """Send a signal; False if there is no such process (any more)."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
