# 21.4: or wait for each other
import threading


class Writer:
    thread = None

    def __init__(self, write):
        self.write, self.error = write, None

    def save(self, step, state):
        self.wait()
        kept = copied(state)
        Writer.thread = threading.Thread(target=self.run, args=(step, kept))
        self.thread.start()

    def run(self, step, state):
        try:
            self.write(step, state)
        except BaseException as error:
            self.error = error

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            Writer.thread = None
        error, self.error = self.error, None
        if error is not None:
            raise error


def copied(state):
    if isinstance(state, dict):
        return {name: copied(item) for name, item in state.items()}
    if isinstance(state, list):
        return [copied(item) for item in state]
    return state.copy() if hasattr(state, "copy") else state
