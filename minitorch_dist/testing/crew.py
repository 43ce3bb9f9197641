"""Ranks that stay for many calls: a launch costs more than most of what tests have ranks do.

    with crew.Crews() as crews:
        crews.call("tests.comm.cases:views", n=3)                                    # as ranks.call does
        crews.call("tests.comm.cases:groups", n=3, env={"MINITORCH_NODES": "2"})     # other ranks: not these settings

What a call leaves behind in its processes the next one finds: for what only a fresh process shows, and for calls that
are meant to fail, take ranks.call.
"""

import os
import pickle
import select
import shutil
import sys
import tempfile
import time
from pathlib import Path

from . import ranks

CHILD = Path(__file__).with_name("crew_child.py")
IDLE_RANKS = 24       # that a Crews keeps at most
END_SECONDS = 20      # for the ranks of a crew to leave their programs
LOOK_EVERY = 0.1      # seconds between two looks whether the ranks still live
NO_PART = ("PYTEST_CURRENT_TEST",)     # of the environment that ranks are told apart by


class Crew:
    """n ranks, after comm.world()."""

    def __init__(self, n, env=None):
        self.n, self.calls, self.run = n, 0, None
        self.folder = Path(tempfile.mkdtemp(prefix="crew-"))
        (self.folder / "call.pickle").write_bytes(pickle.dumps([os.path.abspath(path) for path in sys.path]))
        pipes = [self.folder / "done", *(self.folder / f"rank-{rank}.orders" for rank in range(n))]
        for pipe in pipes:
            os.mkfifo(pipe)
        # For reading and writing: so that opening waits for nobody, and the orders end with this process at the latest.
        self.done, *self.orders = [os.open(pipe, os.O_RDWR | os.O_CLOEXEC) for pipe in pipes]
        self.launch = ranks.Launch(self.folder, [str(CHILD), str(self.folder)], n, env=env)

    def call(self, target, args=(), limit=60):
        """The list of the values of `module:function`, by rank. AssertionErrors as from ranks.call; then call finish.
        """
        number, self.calls = self.calls, self.calls + 1
        (self.folder / f"call-{number}.pickle").write_bytes(pickle.dumps((target, tuple(args))))
        for order in self.orders:
            os.write(order, b"%d\n" % number)
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
            if select.select([self.done], [], [], LOOK_EVERY)[0]:
                left -= len(os.read(self.done, left))
            elif self.launch.process.poll() is not None or time.monotonic() > end:
                return False
        return True

    def finish(self, seconds=END_SECONDS):
        """End the ranks, if they haven't ended; their ranks.Run."""
        if self.run is None:
            for pipe in self.orders if seconds else ():
                os.close(pipe)
            self.run = self.launch.finish(seconds)
            for pipe in (self.done, *(() if seconds else self.orders)):
                os.close(pipe)
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.run


class Crews:
    """A crew for each number of ranks and environment that is asked for."""

    def __init__(self):
        self.crews = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for crew in [self.crews.pop(key) for key in list(self.crews)]:
            run = crew.finish()
            if error == (None, None, None):
                run.check()

    def call(self, target, n, args=(), limit=60, env=None):
        """As ranks.call, on ranks that are there already if one with this n, env and environment came before."""
        own = {name: value for name, value in os.environ.items() if name not in NO_PART}
        key = n, frozenset((own | (env or {})).items()), tuple(sys.path), os.getcwd()
        crew = self.crews.pop(key, None) or self.start(n, env)
        try:
            values = crew.call(target, args, limit)
        except BaseException:
            crew.finish(0)
            raise
        self.crews[key] = crew      # the last in the order of their use
        return values

    def start(self, n, env):
        """A new crew; those that have been idle for longest go, if there would be too many."""
        while self.crews and n + sum(crew.n for crew in self.crews.values()) > IDLE_RANKS:
            self.crews.pop(next(iter(self.crews))).finish().check()
        return Crew(n, env)
