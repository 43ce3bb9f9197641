"""Programs in which rank 1 goes wrong: python faulty.py FAULT PLACE, on several ranks.

A fault is a function of (world, x), run by rank 1 while the others go on reducing x; those with `@on_all` run on every
rank, and those without arguments before rank 1 comes to comm.world(). docs/faults.md shows their text and what comes
of it.
"""

import inspect
import os
import signal
import sys
import threading
import time
import warnings

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm
from minitorch_dist.launch_env import launched_rank

FAULTS, ON_ALL = {}, set()


def fault(name):
    def register(function):
        FAULTS[name] = function
        return function
    return register


def on_all(function):
    ON_ALL.add(function)
    return function


def broken(*_):
    raise ValueError("the value is wrong")


def launcher():
    """The process number of mpirun: the farthest ancestor that is a launcher's process."""
    found, pid = None, os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            name, rest = file.read().split("(", 1)[1].rsplit(")", 1)
        if name.startswith(("mpi", "hydra", "prte", "orte")):
            found = pid
        pid = int(rest.split()[1])
    return found


# ---------------------------------------------------------------- before comm.world()

@fault("raises before comm.world()")
def raises_before_comm_world():
    broken()


@fault("sys.exit(3) before comm.world()")
def sys_exit_3_before_comm_world():
    sys.exit(3)


@fault("os._exit(0) before comm.world()")
def os__exit_0_before_comm_world():
    os._exit(0)


@fault("leaves before comm.world()")
def leaves_before_comm_world():
    sys.exit()


@fault("never comes to comm.world()")
def never_comes_to_comm_world():
    time.sleep(60)


# ---------------------------------------------------------------- an exception

@fault("raises")
def raises(world, x):
    broken()


@fault("raises in a gradient hook")
def raises_in_a_gradient_hook(world, x):
    w = mt.tensor([1.0, 2.0], requires_grad=True)
    w.register_post_accumulate_grad_hook(broken)
    (w * w).sum().backward()


@fault("raises in a backward rule")
def raises_in_a_backward_rule(world, x):
    sin = mt.custom_vjp(np.sin).defvjp(lambda a: (mt.sin(a), a), broken)
    sin(mt.tensor([1.0, 2.0], requires_grad=True)).sum().backward()


@fault("raises in a thread")
def raises_in_a_thread(world, x):
    threading.Thread(target=broken).start()
    time.sleep(60)


@fault("raises while a work is outstanding")
def raises_while_a_work_is_outstanding(world, x):
    world.all_reduce(x, async_op=True)
    broken()


# ---------------------------------------------------------------- the end of the program

@fault("sys.exit(3)")
def sys_exit_3(world, x):
    sys.exit(3)


@fault("sys.exit(text)")
def sys_exit_text(world, x):
    sys.exit("no such data")


@fault("raise SystemExit(3), while the others compute")
@on_all
def raise_systemexit_3_while_the_others_compute(world, x):
    if world.rank == 1:
        raise SystemExit(3)
    time.sleep(60)


@fault("sys.exit(0)")
def sys_exit_0(world, x):
    sys.exit(0)


@fault("os._exit(0)")
def os__exit_0(world, x):
    os._exit(0)


@fault("os._exit(3)")
def os__exit_3(world, x):
    os._exit(3)


@fault("runs out of data early")
@on_all
def runs_out_of_data_early(world, x):
    batches = 5 if world.rank == 0 else 3
    for _ in range(batches):
        world.all_reduce(x)   # in the fourth batch rank 0 is alone


# ---------------------------------------------------------------- signals

@fault("SIGKILL")
def sigkill(world, x):
    os.kill(os.getpid(), signal.SIGKILL)


@fault("SIGSEGV")
def sigsegv(world, x):
    os.kill(os.getpid(), signal.SIGSEGV)


@fault("SIGTERM")
def sigterm(world, x):
    os.kill(os.getpid(), signal.SIGTERM)


@fault("KeyboardInterrupt")
def keyboardinterrupt(world, x):
    raise KeyboardInterrupt


@fault("Ctrl-C while all ranks wait")
@on_all
def ctrl_c_while_all_ranks_wait(world, x):
    if world.rank == 0:
        threading.Timer(0.5, os.kill, (launcher(), signal.SIGINT)).start()   # what Ctrl-C does
    world.recv(x, (world.rank + 1) % world.size)   # from a rank that waits as well


# ---------------------------------------------------------------- collectives that don't fit together

@fault("another shape")
@on_all
def another_shape(world, x):
    world.all_reduce(x if world.rank != 1 else x[:5])


@fault("another dtype")
@on_all
def another_dtype(world, x):
    world.all_reduce(x if world.rank != 1 else x.astype("f8"))


@fault("another op")
@on_all
def another_op(world, x):
    world.all_reduce(x, "sum" if world.rank != 1 else "max")


@fault("another root")
@on_all
def another_root(world, x):
    world.broadcast(x, src=0 if world.rank != 1 else 1)


@fault("another order")
@on_all
def another_order(world, x):
    if world.rank == 1:
        world.barrier()
    world.all_reduce(x)
    if world.rank != 1:
        world.barrier()


@fault("another shape, posted")
@on_all
def another_shape_posted(world, x):
    first = world.all_reduce(x, async_op=True)
    second = world.all_reduce(x if world.rank != 1 else x[:5], async_op=True)
    first.wait()
    second.wait()


@fault("another shape, in a part of the ranks")
@on_all
def another_shape_in_a_part_of_the_ranks(world, x):
    pair = world.split(world.rank // 2, name="pair")
    pair.all_reduce(x if world.rank != 1 else x[:5])


# ---------------------------------------------------------------- ranks that wait for each other

@fault("waits in another communicator")
@on_all
def waits_in_another_communicator(world, x):
    mesh = comm.DeviceMesh(dp=-1)
    if world.rank == 0:
        world.all_reduce(x)
    mesh["dp"].all_reduce(x.copy())   # where the others wait for rank 0


# ---------------------------------------------------------------- never comes

@fault("never comes: computes for ever")
def never_comes_computes_for_ever(world, x):
    time.sleep(60)


@fault("never comes: waits for a message that nobody sends")
def never_comes_waits_for_a_message_that_nobody_sends(world, x):
    world.recv(x, 0, tag=7)


@fault("no fault")
@on_all
def no_fault(world, x):
    """Errors that are handled, an exit that is caught, a forked child that ends, and an idle peer."""
    if world.rank == 1:
        for mistake in (lambda: world.all_reduce(x, "avg"), sys.exit, lambda: sys.exit(5)):
            try:
                mistake()
            except (ValueError, SystemExit) as error:
                world.kept = error
        with warnings.catch_warnings():     # from Python 3.12 on, of a fork beside other threads: the guard's, here
            warnings.simplefilter("ignore", DeprecationWarning)
            if os.fork() == 0:
                os._exit(7)
        os.wait()
    else:
        time.sleep(1)


def joins_the_others():
    return comm.world()


def main(name, place):
    function = FAULTS[name]
    if launched_rank() == 1 and not inspect.signature(function).parameters:
        function()
    world = joins_the_others()
    x = world.empty(10, "f4") if place == "window" else np.zeros(10, "f4")
    world.all_reduce(x)
    if world.rank == 1 or function in ON_ALL:
        function(world, x)
    else:
        while True:
            world.all_reduce(x)   # the others wait here


if __name__ == "__main__":
    main(*sys.argv[1:])
