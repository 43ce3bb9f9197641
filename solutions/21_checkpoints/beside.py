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
        # begin with what must be remembered between two calls: a thread, and what it met
        self.write, self.thread, self.error = write, None, None

    def save(self, step, state):
        """Copy the state, and return while it is being written; wait before that if another one still is.

        state  a dict of arrays, numbers, and lists and dicts of these, which the next step changes in place
        """
        # begin with the one that may be under way. Then copy: all arrays, in whatever they lie. Then start a thread
        self.wait()
        kept = copied(state)
        self.thread = threading.Thread(target=self.run, args=(step, kept))
        self.thread.start()

    # ours
    def run(self, step, state):
        try:
            self.write(step, state)
        except BaseException as error:
            self.error = error

    def wait(self):
        """Return when all that was saved is written."""
        # begin with the thread, if there is one. An error that comes out once must be forgotten before it is raised
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        error, self.error = self.error, None
        if error is not None:
            raise error


# ours
def copied(state):
    if isinstance(state, dict):
        return {name: copied(item) for name, item in state.items()}
    if isinstance(state, list):
        return [copied(item) for item in state]
    return state.copy() if hasattr(state, "copy") else state
