"""What mpirun starts instead of a rank that a starter forks: python starter_client.py FOLDER ARGUMENT…

It hands its descriptors and its environment to the starter of its rank, hands on signals, and ends as the rank ends.
"""

import json
import os
import resource
import signal
import socket
import sys

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


def request(connection, argv, environment, cwd, descriptors):
    """Ask for a child; descriptors: {number there: descriptor here}."""
    message = {"argv": argv, "environment": environment, "cwd": cwd, "numbers": list(descriptors)}
    socket.send_fds(connection, [json.dumps(message).encode()], list(descriptors.values()))


def connect(address):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    return connection


def main(folder, *argv):
    rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    wire = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []
    connection = connect(os.path.join(folder, rank))
    for number in HANDED_ON:
        signal.signal(number, lambda number, frame: connection.send(b"%d" % number))
    request(connection, argv, dict(os.environ), os.getcwd(), {number: number for number in (0, 1, 2, *wire)})
    # mpirun's own wire stays open here: it must hear no earlier of the rank's end than of this process's, whose status
    # it then tells.
    status = int(connection.recv(100) or 1)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))        # as in the rank
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
