"""Several machines on one: by Linux's namespaces each has a name, processes, shared memory and a disk of its own.

    with Machines(["a", "b"], disk) as machines:
        machines.run([TRAIN, …], n=4)       # ranks 0 and 1 on a, 2 and 3 on b
        machines.end("b")                   # all of its processes at once

MINITORCH_NODES pretends to have several, among processes that could still see each other; here they can't. mpirun
starts its ranks as it does over ssh, by a program that enters the machine instead. What is the same on all machines, as
on a cluster: the files, but for those in `disk`; and, since nothing here leaves the computer, the network.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from minitorch_dist.launch_env import without_launcher
from minitorch_dist.testing.ranks import mpirun_command

END_SECONDS = 10
# A machine's first process; with it all others end. $0 is its name, $1 the disk.
FIRST = ('hostname "$0" && mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$1" && '
         'echo begun && exec sleep 1000000')
# What mpirun takes for ssh: options, the machine's name, a command. $0 is its own path.
ENTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
first=$(cat "$(dirname "$0")/$1") || exit 1
shift
exec nsenter --target "$first" %s --uts --ipc --mount --pid -- sh -c "cd '$PWD'; $*"
"""


class NoMachines(Exception):
    """What the system says of it."""


class Machines:
    """Machines of these names, each with `slots` ranks; ranks of small numbers are on the first ones.

    disk  a folder, of which each machine has another by the same name; what is there now is hidden from all

    environment  for mpirun, Open MPI's too. NoMachines where the system doesn't let this user have namespaces.
    """

    def __init__(self, names, disk, slots=2):
        self.names, self.disk, self.slots = names, Path(disk), slots
        self.processes = {}

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="machines-"))
        self.disk.mkdir(exist_ok=True)
        own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        try:
            for name in self.names:
                self._begin(name, own)
        except Exception:
            self.__exit__()
            raise
        enter, hosts, slots = (self.folder / name for name in ("enter", "hosts", "slots"))
        enter.write_text(ENTER % ("--user --preserve-credentials" if own else ""))
        enter.chmod(0o755)
        hosts.write_text("".join(f"{name}:{self.slots}\n" for name in self.names))
        slots.write_text("".join(f"{name} slots={self.slots}\n" for name in self.names))
        self.environment = {
            "HYDRA_HOST_FILE": str(hosts), "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(enter),      # MPICH's
            "PRTE_MCA_prte_default_hostfile": str(slots), "PRTE_MCA_plm": "ssh", "PRTE_MCA_plm_ssh_agent": str(enter)}
        return self

    def _begin(self, name, own):
        self.processes[name] = process = subprocess.Popen(
            ["unshare", *own, "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", FIRST, name, self.disk], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)
        if process.stdout.readline() != "begun\n":
            raise NoMachines(process.stderr.read().strip())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (self.folder / name).write_text(children[0])

    def start(self, command, **variables):
        """What mpirun's ranks of these machines are told to do: its process, of a group of its own, with what it says
        on a pipe."""
        return subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, start_new_session=True,
                                env=without_launcher(os.environ) | self.environment | variables)

    def run(self, arguments, n, limit=60, **variables):
        """(status, what was said) of a Python program on n ranks. (Not by ranks.launch: the numbers of processes that
        it would kill are another machine's.)"""
        return self.finish(self.start([*mpirun_command(), "-n", n, sys.executable, *arguments], **variables), limit)

    @staticmethod
    def finish(process, limit=60):
        """(status, what it has said). TimeoutExpired, and the group is killed, if it takes longer."""
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, said

    def end(self, name):
        """The machine is gone, and what ran on it."""
        process = self.processes.pop(name)
        process.kill()
        process.communicate()
        first, limit = (self.folder / name).read_text(), time.monotonic() + END_SECONDS
        (self.folder / name).unlink()
        while Path(f"/proc/{first}").exists() and time.monotonic() < limit:
            time.sleep(0.01)

    def __exit__(self, *exc):
        for process in self.processes.values():
            process.kill()
            process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)
