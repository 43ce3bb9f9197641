"""Children of a check that are forked, where many answers are checked: what they import is imported once for all.

    with Starters() as starters:
        check_answer(course, exercise, path, start=starters.launch)

What runs in a child, and what it may do, is the same as when it is started by itself (starter.py). Those of exercises
with ranks find the library loaded, the others NumPy alone. Ranks with the same number have the same hashes of strings,
and those of different numbers have not.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from minitorch_dist.comm.state import read_state
from minitorch_dist.testing import ranks

from .course import ROOT
from .starter_client import connect, request

STARTER, CLIENT = (Path(__file__).with_name(name) for name in ("starter.py", "starter_client.py"))
# What child.py and minitorch_dist import of others.
USUAL = ("numpy", "array", "bz2", "concurrent.futures", "dataclasses", "faulthandler", "gzip", "hashlib", "json",
         "linecache", "logging", "lzma", "mmap", "queue", "select", "shutil", "signal", "socket", "string", "tempfile",
         "threading", "traceback")
LIBRARY = ["minitorch_dist"]      # of exercises with ranks
SECONDS = 30      # for a starter to begin, or to end


class Starters:
    """Starters, each begun when it is first needed: one for each rank and each set of modules beyond the usual."""

    def __enter__(self):
        short = len(tempfile.gettempdir()) < 60       # the name of a socket has 107 bytes at most
        self.folder = Path(tempfile.mkdtemp(prefix="starters-", dir=None if short else "/tmp"))
        self.processes, self.lock = {}, threading.Lock()
        return self

    def __exit__(self, *error):
        for process in self.processes.values():
            process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:       # an answer has stopped it, or somebody else holds its stdin
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def launch(self, arguments, n, limit, cwd, env, inherit, still):
        """As ranks.launch of [*flags, child.py, box]; it is ranks.launch itself but on Linux, and under Open MPI."""
        if not hasattr(os, "pidfd_open") or inherit or n > 1 and len(ranks.mpirun_command()) > 1:
            return ranks.launch(arguments, n, limit, cwd=cwd, env=env, inherit=inherit, still=still)
        *flags, child, box = map(str, arguments)
        job = json.loads((Path(box) / "job.json").read_text())
        modules = (LIBRARY if job["kind"] == "ranks" else []) + job["allow"]
        for rank in range(n):
            self.begin(rank, flags, env, modules)
        place = self.place(modules)
        if n > 1:
            return ranks.launch(["-I", "-S", CLIENT, place, child, box], n, limit, cwd=cwd, env=env, inherit=False,
                                still=still)
        return alone(place / "0", [child, box], limit, cwd, ranks.clean() | env)

    def place(self, modules):
        """The folder of the sockets of the starters with these modules, by rank."""
        return self.folder / "+".join(["with", *modules])

    def begin(self, rank, flags, env, modules):
        """Have the starter of a rank, with these modules beyond the usual ones."""
        address = self.place(modules) / str(rank)
        with self.lock:
            if address in self.processes and self.processes[address].poll() is None:
                return
            address.unlink(missing_ok=True)       # of one that an answer has killed
            address.parent.mkdir(exist_ok=True)
            self.processes[address] = process = subprocess.Popen(
                [sys.executable, *flags, STARTER, address, ROOT, *USUAL, *modules], env=ranks.clean() | env,
                stdin=subprocess.PIPE, start_new_session=True, cwd=self.folder)
            end = time.monotonic() + SECONDS
            while not address.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"a starter of children with {modules} doesn't begin (status {process.poll()})")
                time.sleep(0.01)


def alone(address, argv, limit, cwd, environment):
    """One child; its ranks.Run."""
    folder, begin = Path(tempfile.mkdtemp(prefix="ranks-")), time.monotonic()
    try:
        with (open(os.devnull) as nothing, open(folder / "rank-0.out", "w") as out,
              open(folder / "rank-0.err", "w") as err, connect(str(address)) as connection):
            connection.settimeout(limit)
            environment = environment | {"MINITORCH_RANK_STATE": str(folder), "PYTHONUNBUFFERED": "1",
                                         "PYTHONFAULTHANDLER": "1", "PWD": str(cwd)}      # PWD as a shell's
            request(connection, argv, environment, str(cwd), {0: nothing.fileno(), 1: out.fileno(), 2: err.fileno()})
            try:
                status = int(connection.recv(100) or 1)
            except TimeoutError:
                status = None       # its end comes with the connection's
        return ranks.Run(argv, status, status is None, time.monotonic() - begin,
                         [(folder / "rank-0.out").read_text(errors="replace")],
                         [(folder / "rank-0.err").read_text(errors="replace")],
                         [read_state(folder / "rank-0.state")], [""], "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
