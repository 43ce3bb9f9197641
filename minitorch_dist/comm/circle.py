"""Who waits for whom, in all communicators: ranks that wait for each other in a circle do so for ever.

    rank 0   world.all_reduce(x)         waits for rank 1, which hasn't called it
    rank 1   mesh["dp"].all_reduce(x)    waits for rank 0, which hasn't called it

A rank that has waited for some time in one call writes into its line, in memory that the ranks of a node share, whom it
waits for, and does so again at each look of its watchdog. Only what is certain counts: a collective can't end before
all have called it, and their numbers tell who hasn't (comm/shared.py), posted or not; a receive can't end before its
message is sent, of which its sender counts those that it has posted. Nothing is said of a send, which MPI may keep, of
a wait that ends by itself (a timeout, a message from anybody), of what MPI and the window do once all have called it,
and of ranks whose other threads have called something too. So a circle isn't a guess from the time that has passed:

    look 1   each rank of it is in a call, which has a number
    look 2   each has written again, twice at least, from the same call: at look 1 all of them were in their calls,
             where none of them can call or send what another one waits for

Ranks of other nodes don't see the lines; a circle through them ends at the stall limit.
"""

import threading

from .state import LATE, MESSAGE, state

CALL, LOOKS, GROUP, TAG, NUMBER, FIRST = range(6)    # words of a rank's line; from FIRST on two for each rank
WHY = {LATE: "hasn't called it", MESSAGE: "hasn't sent it"}


def line_bytes(ranks):
    """Of the line that each of so many ranks has."""
    return 8 * (FIRST + 2 * ranks)


class Waits:
    """What the ranks of a node wait for.

    lines  {world rank: its words}, which only it writes:
           CALL             the number of the call that it waits in; 0: it may be doing anything
           LOOKS            how often its watchdog has found it in one
           GROUP, TAG, NUMBER   the message that it waits for
           awaited          for each rank: LATE, MESSAGE, or 0
           owed             for each rank: the number of the call in which that one waits for a message, which this
                            rank hasn't sent
    """

    def __init__(self, rank, lines):
        self.rank, self.lines, self.mine = rank, lines, lines[rank]
        self.places = {other: FIRST + i for i, other in enumerate(lines)}
        self.found, self.looks = None, {}

    def forget(self):
        """This rank waits for nobody that it knows of."""
        self.mine[CALL], self.found = 0, None

    def circle(self, calls, call):
        """The ranks of a circle through this one, which waits in `call`, the program's call number `calls`: each waits
        for the next, the last one for the first. [] if there is none that is certain; so it is at the first look."""
        if not self.tell(calls, call):
            self.forget()
            return []
        looks = {rank: line[LOOKS] for rank, line in self.lines.items()}     # before the words that these looks wrote
        ranks = self.search()
        found = [(rank, self.lines[rank][CALL]) for rank in ranks]
        if found != self.found:
            self.found, self.looks = found, {rank: self.lines[rank][LOOKS] for rank in ranks}
            return []
        return ranks if all(looks[rank] >= self.looks[rank] + 2 for rank in ranks) else []

    def tell(self, calls, call):
        """Write what this rank waits for; False if it has left the call meanwhile."""
        if self.mine[CALL] != calls:
            self.mine[CALL] = 0
        awaited = {} if others_call() else call.awaited()
        message = (call.communicator.token, call.tag, call.number) if MESSAGE in awaited.values() else (0, 0, 0)
        for word, value in zip((GROUP, TAG, NUMBER), message, strict=True):
            self.mine[word] = value
        for rank, place in self.places.items():
            self.mine[place] = awaited.get(rank, 0)
            self.mine[place + len(self.lines)] = self.owed(rank)
        if state.calls != calls or state.call is None:
            return False
        self.mine[CALL] = calls
        self.mine[LOOKS] += 1
        return True

    def owed(self, rank):
        """The call in which that rank waits for a message of this one that hasn't been sent; else 0."""
        line = self.lines[rank]
        call, group, tag, number = line[CALL], line[GROUP], line[TAG], line[NUMBER]
        waits = call and line[self.places[self.rank]] == MESSAGE and group in state.groups and line[CALL] == call
        return call if waits and state.sent.get((group, rank, tag), 0) < number else 0

    def awaited(self, rank):
        """{rank: WHY} of those that this rank waits for, as far as that is certain."""
        line, found = self.lines[rank], {}
        for other, place in self.places.items():
            owed = self.lines[other][self.places[rank] + len(self.lines)]
            if line[CALL] and (line[place] == LATE or line[place] == MESSAGE and owed == line[CALL]):
                found[other] = WHY[line[place]]
        return found

    def search(self):
        """The ranks of a shortest circle through this one, or []."""
        ways, seen = [[self.rank]], set()
        for way in ways:
            for rank in self.awaited(way[-1]):
                if rank == self.rank:
                    return way
                if rank not in seen:
                    seen.add(rank)
                    ways.append([*way, rank])
        return []


def others_call():
    """Whether another thread has called something too, and they don't take turns: nobody knows what it will do."""
    alive = {thread.ident for thread in threading.enumerate()}
    return state.turn is None and bool(state.threads & alive - {state.thread})
