"""Saves steps 1 and 2, and dies without a word at the N-th thing that it asks of the file system for step 2."""

import builtins
import os
import shutil

from minitorch_dist import nn, optim
from minitorch_dist.checkpoints import Checkpoints

ASKED = [(os, "fsync"), (os, "rename"), (os, "open"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (builtins, "open"),
         (shutil, "rmtree")]


def main(folder, fatal, after, async_op):
    """fatal: N; after: whether it is done first; async_op: by a thread of the save's."""
    model = nn.Linear(30, 20)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    checkpoints, count = Checkpoints(folder, keep=1, async_op=async_op), 0

    def deadly(function):
        def call(*args, **options):
            nonlocal count
            count += 1
            now = count == fatal
            if now and not after:
                os._exit(9)
            result = function(*args, **options)
            if now:
                os._exit(9)
            return result
        return call
    for step in (1, 2):
        for p in model.parameters():
            p.data[...] = step
        if step == 2:
            for module, name in ASKED:
                setattr(module, name, deadly(getattr(module, name)))
        checkpoints.save(step, model, optimizer)
        checkpoints.wait()
