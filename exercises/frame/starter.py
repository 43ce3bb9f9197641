"""A process that has imported what children need, and forks for every one:

    python starter.py ADDRESS CHECKOUT MODULE…

It never sees a truth, nor runs an answer itself. A request is a message to the socket ADDRESS, with the descriptors
that the child shall have; the answer is the child's status. A child ends with its connection, all end with stdin.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random  # noqa: F401 (seeds itself anew in every fork)
import selectors
import shutil
import signal
import socket
import sys
import types
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
FREE = 100      # descriptors from here on are in nobody's way


def serve(address):
    """Fork for every request. Returns in the children: (request, descriptors)."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(address + ".new")
    server.listen(64)
    os.rename(address + ".new", address)
    waiting = selectors.DefaultSelector()
    waiting.register(server, selectors.EVENT_READ)
    waiting.register(sys.stdin.buffer, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select()[:1]:             # one at a time: it may end what another is about
            if key.fileobj is server:
                connection, _ = server.accept()
                message, descriptors, _, _ = socket.recv_fds(connection, 1 << 18, 16)
                if not message:                         # it ended before it asked
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    close_all(waiting)
                    connection.close()
                    return json.loads(message), descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                waiting.register(connection, selectors.EVENT_READ, pid)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            elif key.data is None:                      # stdin: whoever started this is gone
                end(waiting, address)
            elif isinstance(key.data, tuple):
                reap(waiting, key.fd, *key.data)
            else:
                number = key.fileobj.recv(100)
                os.kill(key.data, int(number) if number else signal.SIGKILL)
                if not number:
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()


def reap(waiting, process, pid, connection):
    """A child has ended: tell its status, if somebody listens."""
    waiting.unregister(process)
    os.close(process)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if connection.fileno() >= 0:
        waiting.unregister(connection)
        with contextlib.suppress(OSError):
            connection.send(b"%d" % status)
        connection.close()


def end(waiting, address):
    """All children end, and the folder goes, which nobody may be there to remove."""
    for key in waiting.get_map().values():
        if isinstance(key.data, tuple):
            os.kill(key.data[0], signal.SIGKILL)
    shutil.rmtree(Path(address).parents[1], ignore_errors=True)
    sys.exit()


def close_all(waiting):
    for key in list(waiting.get_map().values()):
        if key.data is not None or key.fd != 0:
            os.close(key.fileobj) if isinstance(key.fileobj, int) else key.fileobj.close()
    waiting.close()


def become(request, descriptors):
    """The process that child.py would be, had it been started as usual."""
    os.setsid()
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, request["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    module = types.ModuleType("__main__")
    module.__file__ = sys.argv[0]
    sys.modules["__main__"] = module
    if "minitorch_dist.comm" in sys.modules:      # whose import asks which rank this is, and begins to guard it
        importlib.reload(sys.modules["minitorch_dist.comm"])
    return vars(module)


if __name__ == "__main__":
    address, checkout, *names = sys.argv[1:]
    sys.path.insert(0, checkout)      # as child.py
    for name in names:
        importlib.import_module(name)
    sys.path.remove(checkout)
    code = compile(CHILD.read_text(encoding="utf-8"), str(CHILD), "exec", dont_inherit=True)
    gc.freeze()       # children's collections leave alone what they share with this process
    exec(code, become(*serve(address)))
