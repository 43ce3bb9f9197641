"""The processes that share emulated GPUs' NCCL: each answers the others' questions, from threads beside the program."""

import os
import sys
import threading
import uuid
from multiprocessing.connection import Client, Listener

from .cuda import gpus
from .machine import CudaError

USAGE, REMOTE = 5, 6        # ncclInvalidUsage, ncclRemoteError


class Process:
    """This process, as others know it: its address, and what its communicators' operations have published. A key is
    (communicator's name, rank, "collective", number) or (…, rank, "send" or "receive", peer, number)."""

    def __init__(self):
        self.name = f"emulated-nccl-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.address, self.ids = "\0" + self.name, 0            # a Unix-domain socket that has no file
        self.posted, self.published = {}, {}        # key -> (stream, number); key -> (Published, who will ask)
        self.meetings, self.gone = {}, set()        # name -> [(size, rank, address, GPU)]; (name, rank)
        self.leaving = False
        self.listener = Listener(self.address, "AF_UNIX", backlog=64)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while True:
            threading.Thread(target=self.answer, args=(self.listener.accept(),), daemon=True).start()

    def answer(self, connection):
        with connection:
            try:
                what, *arguments = connection.recv()
            except EOFError:        # it only wanted to know whether there is somebody
                return
            try:
                with gpus.changed:
                    reply = True, getattr(self, what)(*arguments)
            except CudaError as error:
                reply = False, error.args
            try:
                connection.send(reply)
            except OSError:         # it has gone meanwhile
                pass

    def join(self, name, *who):
        """Meet the other ranks of a communicator; {rank: address}."""
        met = self.meetings.setdefault(name, [])
        met.append(who)
        gpus.changed.notify_all()
        size = who[0]
        gpus.wait(lambda: refusal(met) or len(met) == size,
                  lambda: f"of {size} ranks only {sorted(rank for _, rank, *_ in met)} have come")
        if refusal(met):
            raise CudaError(USAGE, refusal(met))
        return {rank: address for _, rank, address, _ in met}

    def give(self, key, asker):
        """What an operation has published."""
        name, rank, *what = key
        gpus.wait(lambda: key in self.posted or (name, rank) in self.gone,
                  lambda: f"rank {rank} has not called {words_of(what)}")
        if key not in self.posted:
            raise CudaError(REMOTE, f"rank {rank} has destroyed the communicator before {words_of(what)}")
        if error := gpus.beside(*self.posted[key]):
            raise error
        if key not in self.published:
            raise CudaError(REMOTE, f"rank {rank} has failed before {words_of(what)}")
        found, askers = self.published[key]
        askers.remove(asker)
        if not askers:
            del self.published[key], self.posted[key]
            gpus.changed.notify_all()
        return found

    def is_leaving(self):
        return self.leaving


def words_of(what):
    kind, *peer, number = what
    return f"{kind} {number}" + (f" {'to' if kind == 'send' else 'from'} rank {peer[0]}" if peer else "")


def refusal(met):
    """Why these (size, rank, address, GPU) are no communicator, or None."""
    sizes, ranks, _, owned = zip(*met, strict=True)
    if len(set(sizes)) > 1:
        return f"ranks {ranks} say that there are {sizes} of them"
    for rank in ranks:
        if ranks.count(rank) > 1:
            return f"rank {rank} has come twice"
    for gpu in owned:
        if owned.count(gpu) > 1:
            return f"ranks {[r for r, g in zip(ranks, owned, strict=True) if g == gpu]} are on the same GPU: {gpu}"
    return None


process = None      # a Process, as soon as there is need of one


def this_process():
    global process
    process = process or Process()
    return process


def asked(address, *question):
    """The answer of a process."""
    try:
        with Client(address) as connection:
            connection.send(question)
            good, answer = connection.recv()
    except (EOFError, OSError) as error:
        raise CudaError(REMOTE, f"its process has ended ({type(error).__name__})") from error
    if not good:
        raise CudaError(*answer)
    return answer


def ask_all(questions, enough=lambda: False):
    """[answer, or CudaError, of each (address, *question)]. Meanwhile other threads go on. `enough` ends it."""
    answers = {}

    def ask(i):
        try:
            answer = asked(*questions[i])
        except CudaError as error:
            answer = error
        with gpus.changed:
            answers[i] = answer
            gpus.changed.notify_all()
    for i in range(len(questions)):
        threading.Thread(target=ask, args=(i,), daemon=True).start()
    with gpus.changed:
        gpus.changed.wait_for(lambda: len(answers) == len(questions) or enough())
    return [answers.get(i) for i in range(len(questions))]


def leave():
    """At the end of a program: do what is left, and stay until the others have what they will ask for."""
    if process is None or hasattr(sys, "last_value"):       # (it ends with an error)
        return
    with gpus.changed:
        try:
            gpus.finish()
        except CudaError as error:
            print(f"NCCL, at the end: {error.args[1]}", file=sys.stderr)
        process.leaving = True
        while askers := {address for _, all_of_it in process.published.values() for address in all_of_it}:
            if all(answer is True or isinstance(answer, CudaError)
                   for answer in ask_all([(address, "is_leaving") for address in askers])):
                return
            gpus.changed.wait(0.1)
