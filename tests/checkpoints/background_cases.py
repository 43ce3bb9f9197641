"""What the ranks do in test_background.py."""

import time
from pathlib import Path

from minitorch_dist import checkpoints, comm, nn
from minitorch_dist.checkpoints import Checkpoints, writing
from minitorch_dist.parallel import DistributedDataParallel

from .cases import Training


def both_ways(name, way, folder):
    """Save, then save again beside a step of training, which changes all that is saved."""
    run = Training(name, way).train(0, 2)
    checkpoints.save(Path(folder) / "waited", run.model, run.optimizer, {"a": run.world.rank}, run.world)
    write, trained = writing.write, False

    def late(path, content):
        end = time.monotonic() + 20
        while not trained and time.monotonic() < end:
            time.sleep(0.001)
        return write(path, content)
    writing.write = late
    try:
        saving = checkpoints.save(Path(folder) / "beside", run.model, run.optimizer, {"a": run.world.rank}, run.world,
                                  async_op=True)
        before = saving.is_completed(), saving.path.exists()
        run.train(2, 3)
    finally:
        trained = True
        saving.wait()
        writing.write = write
    return before, (saving.is_completed(), saving.path.exists())


def unwaited(folder, times):
    """Save again and again, and let the threads finish: {step} of those that came to be, whether they left notes."""
    world = comm.world()
    model = DistributedDataParallel(nn.Linear(30, 20), world)
    found = []
    for step in range(times):
        saving = checkpoints.save(Path(folder) / str(step), model, None, None, world, async_op=True)
        end = time.monotonic() + 20
        while not saving.path.exists() and time.monotonic() < end:
            time.sleep(0.001)
        found.append(saving.path.exists())
        world.barrier()
        saving.wait()       # to learn what failed
    return found


def unseen(path):
    """A file system that shows no rank the others' notes: (what is there before the wait, and after it)."""
    world = comm.world()
    model = DistributedDataParallel(nn.Linear(30, 20), world)
    notes, writing.Saving._notes = writing.Saving._notes, lambda self: None
    try:
        saving = checkpoints.save(path, model, None, None, world, async_op=True)
        saving._thread.join()
        world.barrier()
        before = Path(path).exists()
        world.barrier()
        for _ in range(2):      # the second has nothing to do
            saving.wait()
    finally:
        writing.Saving._notes = notes
    return before, sorted(file.name for file in Path(path).iterdir())


def full_disk(folder, rank):
    """Step 2 can't be written by one rank: (the errors of the two waits, the steps then; those after step 3)."""
    world = comm.world()
    model = DistributedDataParallel(nn.Linear(30, 20), world)
    there, write, errors = Checkpoints(folder, world, async_op=True), writing.write, []
    there.save(1, model)
    there.wait()

    def full(path, content):
        if world.rank == rank:
            raise OSError(28, "No space left on device", str(path))
        return write(path, content)
    writing.write = full
    try:
        there.save(2, model)
        saving = there._under_way
        for wait in (there.wait, saving.wait):
            try:
                wait()
            except OSError as error:
                errors.append(str(error))
    finally:
        writing.write = write
    world.barrier()
    steps, left = there.steps(), sorted(path.name for path in Path(folder).iterdir())
    world.barrier()
    there.save(3, model)
    there.wait()
    return errors, steps, left, there.steps()


def no_memory(path):
    """Rank 1's thread has none: what each of two waits raises, and what is left."""
    world = comm.world()
    model, write, errors = DistributedDataParallel(nn.Linear(30, 20), world), writing.write, []

    def full(path, content):
        if world.rank == 1:
            raise MemoryError("no room")
        return write(path, content)
    writing.write = full
    try:
        saving = checkpoints.save(path, model, None, None, world, async_op=True)
        for _ in range(2):
            try:
                saving.wait()
            except MemoryError as error:
                errors.append(str(error))
    finally:
        writing.write = write
    world.barrier()
    return errors, sorted(file.name for file in Path(path).parent.iterdir())


def no_thread(path):
    """Rank 1 may start none: what the wait raises, and what is left."""
    world = comm.world()
    model, start, error = DistributedDataParallel(nn.Linear(30, 20), world), writing.threading.Thread.start, None

    def limited(thread):
        if world.rank == 1:
            raise RuntimeError("can't start new thread")
        start(thread)
    writing.threading.Thread.start = limited
    try:
        saving = checkpoints.save(path, model, None, None, world, async_op=True)
    finally:
        writing.threading.Thread.start = start
    try:
        saving.wait()
    except OSError as raised:
        error = raised.strerror
    world.barrier()
    return error, sorted(file.name for file in Path(path).parent.iterdir())
