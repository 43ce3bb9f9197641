"""Ranks that stay for many calls: a launch costs more than most of what tests have ranks do.

    with crew.Crews() as crews:
        crews.call("tests.comm.cases:views", n=3)                                    # as ranks.call does
        crews.call("tests.comm.cases:groups", n=3, env={"MINITORCH_NODES": "2"})     # other ranks: not these settings

The world is as fresh in every call as after a launch. What else a call leaves behind in its processes the next one
would find: crew_child.py looks for it, and the call has failed that leaves anything. For what only a fresh process
shows, and for calls that are meant to fail, take ranks.call.
"""

import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from ..comm.joining import readable
from ..launch_env import snapshot
from . import ranks

CHILD = Path(__file__).with_name("crew_child.py")
IDLE_RANKS = 24       # that a Crews keeps at most
CALLS = 100           # that a crew is kept for: MPI has some 2,000 communicators, and few calls free theirs
END_SECONDS = 20      # for the ranks of a crew to leave their programs
LOOK_EVERY = 0.1      # seconds between two looks whether the ranks still live
NO_PART = ("PYTEST_CURRENT_TEST",)     # of the environment that ranks are told apart by
# glibc overwrites what is freed, and what is handed out anew: no call finds the right numbers of the call before it.
PERTURBED = {"MALLOC_PERTURB_": "1"}


class Crew:
    """n ranks, after comm.world()."""

    def __init__(self, n, env=None):
        self.n, self.calls, self.run, self.launch, self.pipes = n, 0, None, None, []
        self.folder = Path(tempfile.mkdtemp(prefix="crew-"))
        try:
            self.begin(env)
        except BaseException:
            self.finish(0)
            raise

    def begin(self, env):
        paths = [os.path.abspath(path) for path in sys.path]
        (self.folder / "call.pickle").write_bytes(pickle.dumps(paths))
        for name in ("done", *(f"rank-{rank}.orders" for rank in range(self.n))):
            os.mkfifo(self.folder / name)
            # For reading and writing: so that opening waits for nobody, and the orders end with this process.
            self.pipes.append(os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC))
        self.launch = ranks.Launch(self.folder, [CHILD, self.folder], self.n, env=PERTURBED | (env or {}))

    def call(self, target, args=(), limit=60):
        """The list of the values of `module:function`, by rank. AssertionErrors as from ranks.call; then call finish.
        """
        number, self.calls = self.calls, self.calls + 1
        (self.folder / f"call-{number}.pickle").write_bytes(pickle.dumps((target, tuple(args))))
        self.order(b"%d\n" % number)
        files = [self.folder / f"rank-{rank}.value-{number}" for rank in range(self.n)]
        if not self.wait(time.monotonic() + limit):
            missing = [rank for rank in range(self.n) if not files[rank].exists()]
            self.finish(0).check()
            raise AssertionError(f"{target}: no value from ranks {missing}\n{self.run.report()}")
        values = [pickle.loads(file.read_bytes()) for file in files]
        for file in (*files, self.folder / f"call-{number}.pickle"):
            file.unlink()
        return values

    def wait(self, end):
        """Whether all ranks are done with a call before the end, and before one of them has ended."""
        left = self.n
        while left:
            if readable(self.pipes[0], LOOK_EVERY):
                left -= len(os.read(self.pipes[0], left))
            elif self.launch.process.poll() is not None or time.monotonic() > end:
                return False
        return True

    def order(self, line):
        for pipe in self.pipes[1:]:
            os.write(pipe, line)

    def finish(self, seconds=END_SECONDS):
        """End the ranks, if they haven't ended; their ranks.Run."""
        if self.run is None:
            try:
                if self.launch is not None:
                    self.order(b"\n")
                    self.run = self.launch.finish(seconds)
            finally:
                while self.pipes:
                    os.close(self.pipes.pop())
                shutil.rmtree(self.folder, ignore_errors=True)
        return self.run

    def end(self):
        """AssertionError if a rank has not ended well."""
        self.finish().check()


class Crews:
    """A crew for each number of ranks and environment that is asked for."""

    def __init__(self):
        self.crews, self.lock = {}, threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        with self.lock, contextlib.ExitStack() as ends:     # all are ended, whatever is wrong with one
            while self.crews:
                _, crew = self.crews.popitem()
                ends.callback(crew.end if kind is None else crew.finish)

    def call(self, target, n, args=(), limit=120, env=None):
        """As ranks.call, on ranks that are there already if one with this n, env and environment came before.

        One call at a time: those of other threads wait.
        """
        own = {name: value for name, value in snapshot(os.environ).items() if name not in NO_PART}
        key = n, frozenset((own | (env or {})).items()), tuple(sys.path), os.getcwd()
        with self.lock:
            crew = self.crews.pop(key, None) or self.start(n, env)
            try:
                values = crew.call(target, args, limit)
            except BaseException:
                crew.finish(0)
                raise
            if crew.calls < CALLS:
                self.crews[key] = crew      # the last in the order of their use
            else:
                crew.end()
        return values

    def start(self, n, env):
        """A new crew; those that have been idle for longest go, if there would be too many."""
        while self.crews and n + sum(crew.n for crew in self.crews.values()) > IDLE_RANKS:
            self.crews.pop(next(iter(self.crews))).end()
        return Crew(n, env)
