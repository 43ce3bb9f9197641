"""Checkpoints: a run's state on disk, written by all ranks together, from which any number of ranks can go on.

    checkpoints = Checkpoints("runs/gpt/checkpoints", world)
    checkpoints.save(step, model, optimizer, loss=loss)             # every so many steps; async_op: beside the training
    step, facts = checkpoints.load(model, optimizer)                # the newest

    step-00000200/
      index.json                what there is, and where: see Index
      rank-0.safetensors        what rank 0 has written
      rank-1.safetensors

Arrays stand under the names and shapes that the model has in one process. What a rank holds of one are pieces of it,
boxes; ranks that hold the same piece (data parallelism) share the work of writing. So it does not matter how a model is
cut: over data, ZeRO's stages, a pipeline's layers, tensor parallelism's parts, by annotations, or by several of these.

    whole w (6, 4)         3 ranks of ZeRO          2 ranks of column parallelism    2 × 2 of ZeRO over these
                           elements 0-7, 8-15, …    rows 0-2, 3-5                    row 0 and half of row 1, …
    read back by any:      what overlaps with the pieces that are wanted

Nothing is lost: a checkpoint is written under another name, and gets its own when all of it is on disk. Whatever ends
the program before that leaves the checkpoint before it.

Source: PyTorch's distributed checkpoint for the idea of pieces under names; the format of the files is safetensors,
which many programs read.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

from .. import attempt
from ..comm.together import together
from .index import INDEX, CheckpointError, Index
from .loading import StoredValues, index_of, load
from .saving import of_group, save
from .writing import Saving, is_being_written

__all__ = ["CheckpointError", "Checkpoints", "Index", "Saving", "StoredValues", "load", "save"]


class Checkpoints:
    """The checkpoints of one run, by the number of steps done: step-00000200 and so on.

    folder    where they lie, for all ranks to see
    comm      the Communicator of all ranks that have a part of the model (default: one process)
    keep      so many are kept, the newest ones; with async_op one more until the next save, or wait
    async_op  save returns when the values are copied, and a thread of each rank writes its share while training goes
              on: the state of model and optimizer is in the hosts' memory once more, divided by the ranks. The next
              save or load waits for it, and wait does; what couldn't be written is raised there
    """

    def __init__(self, folder, comm=None, keep=2, async_op=False):
        if keep < 1:
            raise ValueError(f"Checkpoints: keep={keep}; at least 1 must be kept")
        self.folder, self.comm, self.keep, self.async_op = Path(folder), comm, keep, async_op
        self._under_way = None      # the Saving
        self.step_log = None        # of the run whose they are

    @property
    def _first(self):
        return self.comm is None or self.comm.rank == 0

    def steps(self):
        """The steps at which there is a whole one, in order. As this rank sees the folder. OSError where it can't be
        read: a run that took it for empty would begin anew, and delete what is there."""
        names = []
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.folder)
        return sorted(int(name[5:]) for name in names
                      if re.fullmatch(r"step-[0-9]{8,}", name) and _is_there(self.folder / name / INDEX))

    def path(self, step):
        """Where the checkpoint of a step lies."""
        return self.folder / f"step-{step:08d}"

    def save(self, step, model, optimizer=None, **facts):
        """Write the checkpoint of a step, then delete those that are one too many. See save, the function. ValueError
        where the folder has some of later steps: the newest would be none of this run's."""
        if step < 0:
            raise ValueError(f"Checkpoints.save: step={step}; the steps that were done are 0 or more")
        self.wait()
        together(self.comm, lambda: self._tidy(step) if self._first else None)
        self._under_way = save(self.path(step), model, optimizer, {**facts, "step": step}, self.comm, self.async_op)
        if not self.async_op:
            self._written()

    def wait(self):
        """Return when the checkpoint that is being written is there, if one is. Collective. OSError on all ranks where
        it couldn't be written: those before it stay."""
        if self._under_way is None:
            return
        try:
            self._under_way.wait()
        except Exception:
            self._under_way = None
            raise
        self._under_way = None      # (not where Ctrl-C ends the wait: it is still being written)
        self._written()

    def _tidy(self, step):
        """Take away what saves of this group's have left that were broken off, and what is one too many."""
        if later := [there for there in self.steps() if there > step]:
            raise ValueError(f"{self.folder} has checkpoints of later steps than {step}: {', '.join(map(str, later))}. "
                             "Are they another run's? Delete them, or take another folder")
        for left in (".step-*.deleted", f".step-*.partial{of_group(self.comm)}"):
            for path in self.folder.glob(left):
                if not is_being_written(path):      # by another Checkpoints of this folder, say
                    shutil.rmtree(path, ignore_errors=True)
        self._keep_newest()     # of what was written beside the training, and another Checkpoints didn't wait for

    def _written(self):
        """One more is there: note it, and keep the newest alone. Collective."""
        def note():
            attempt.checkpoint_written(self.steps()[-1], self.step_log)
            self._keep_newest()
        together(self.comm, note if self._first else lambda: None)

    def _keep_newest(self):
        for old in self.steps()[:-self.keep]:
            gone = self.folder / f".{self.path(old).name}.deleted"
            os.rename(self.path(old), gone)     # as a whole, before anything of it is missing
            shutil.rmtree(gone, ignore_errors=True)

    def load(self, model, optimizer=None, step=None):
        """(step, facts) of the newest checkpoint, or that of `step`, written into the model and its optimizer. Without
        any, CheckpointError. See load, the function."""
        step = self._chosen(step)
        return step, load(self.path(step), model, optimizer, self.comm)

    def facts(self, step=None):
        """The facts of the newest checkpoint, or that of `step`, without loading anything. CheckpointError as load's.
        Collective."""
        return index_of(self.comm, self.path(self._chosen(step))).facts

    def _chosen(self, step):
        """The step, or the newest there is, as rank 0 sees the folder."""
        self.wait()

        def find():
            there = self.steps()
            if not there:
                raise CheckpointError(f"{self.folder} has no checkpoint")
            if step not in (None, *there):
                raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; there are those of steps "
                                      f"{', '.join(map(str, there))}")
            return there[-1] if step is None else step
        step = together(self.comm, find)
        return self.comm.broadcast_object(step) if self.comm is not None else step


def _is_there(path):
    """Whether there is a file. OSError where that isn't known. (Path.is_file() says no, from Python 3.14 on.)"""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
