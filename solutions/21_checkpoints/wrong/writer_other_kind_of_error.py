# 21.4: the error that comes out is another one: raise the one that write met
import threading


class Writer:

    def __init__(self, write):
        self.write, self.thread, self.error = write, None, None

    def save(self, step, state):
        self.wait()
        kept = copied(state)
        self.thread = threading.Thread(target=self.run, args=(step, kept))
        self.thread.start()

    def run(self, step, state):
        try:
            self.write(step, state)
        except BaseException as error:
            self.error = error

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        error, self.error = self.error, None
        if error is not None:
            raise RuntimeError(str(error))


def copied(state):
    if isinstance(state, dict):
        return {name: copied(item) for name, item in state.items()}
    if isinstance(state, list):
        return [copied(item) for item in state]
    return state.copy() if hasattr(state, "copy") else state
