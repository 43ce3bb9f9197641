# 21.4: a thread that waits for work
import copy
import queue
import threading


class Writer:
    def __init__(self, write):
        self.write, self.work, self.errors = write, queue.Queue(), []
        threading.Thread(target=self.loop, daemon=True).start()

    def loop(self):
        while True:
            step, state = self.work.get()
            try:
                self.write(step, state)
            except BaseException as error:
                self.errors.append(error)
            self.work.task_done()

    def save(self, step, state):
        kept = copy.deepcopy({name: state[name] for name in state})
        self.wait()
        self.work.put((step, kept))

    def wait(self):
        self.work.join()
        if self.errors:
            raise self.errors.pop()
