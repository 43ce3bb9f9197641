"""A program of which rank 1 goes wrong in the way that its argument names, while rank 0 goes on reducing."""

import os
import signal
import sys
import threading
import time

import numpy as np

from minitorch_dist import comm

world = comm.world()
fault, window = sys.argv[1], sys.argv[2] == "window"
x = world.empty(10, "f4") if window else np.zeros(10, "f4")
world.all_reduce(x)


def broken():
    raise ValueError("the value is wrong")


def go_wrong():
    if fault == "raises":
        broken()
    elif fault == "raises in a thread":
        threading.Thread(target=broken).start()
        time.sleep(60)
    elif fault == "raises while a work is outstanding":
        world.all_reduce(x, async_op=True)
        broken()
    elif fault == "sys.exit(3)":
        sys.exit(3)
    elif fault == "sys.exit(text)":
        sys.exit("no such data")
    elif fault == "SystemExit(3)":
        raise SystemExit(3)
    elif fault == "leaves":
        sys.exit()
    elif fault == "os._exit(0)":
        os._exit(0)
    elif fault == "os._exit(3)":
        os._exit(3)
    elif fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault == "KeyboardInterrupt":
        raise KeyboardInterrupt
    elif fault == "catches":   # no fault at all: errors that are handled, a forked child that ends, an idle peer
        for mistake in (lambda: world.all_reduce(x, "avg"), sys.exit):
            try:
                mistake()
            except (ValueError, SystemExit):
                pass
        if os.fork() == 0:
            os._exit(7)
        os.wait()


if world.rank == 1:
    go_wrong()
elif fault == "catches":
    time.sleep(1)
else:
    for _ in range(10 ** 9):
        world.all_reduce(x)   # rank 0 waits here
