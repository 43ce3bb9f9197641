"""21.4 Beside the training.

Writing takes long, and training could go on meanwhile: a thread writes. But the next step overwrites the parameters,
so first of all they are copied, and training stands still for that time only.

    training   step step ┌copy┐ step step step step ┌copy┐ step step step
    thread               └────── writes ──────┐     └────── writes …
                                              on disk
"""

import threading


class Writer:
    """Writes states beside the training, by write(step, state), which may take long and may raise.

    At most one write is under way, and states are written in the order in which they were saved. Whatever a write
    raises, SystemExit too, comes out once: of the next save, which then saves nothing, or of wait, whichever is first.
    After that the Writer can be used again.
    """

    def __init__(self, write):
        raise NotImplementedError("begin with what must be remembered between two calls: a thread, and what it met")

    def save(self, step, state):
        """Copy the state, and return while it is being written; wait before that if another one still is.

        state  a dict of arrays, numbers, and lists and dicts of these, which the next step changes in place
        """
        raise NotImplementedError("begin with the one that may be under way. Then copy: all arrays, in whatever they "
                                  "lie. Then start a thread")

    def wait(self):
        """Return when all that was saved is written."""
        raise NotImplementedError("begin with the thread, if there is one. An error that comes out once must be "
                                  "forgotten before it is raised")
