"""Staleness by dates: did somebody overwrite what backward still needs?

One clock orders the nodes of the tape and dates the framework's writes. A node
saves arrays at its date; if any of their bytes has a later write, its backward
would be silently wrong, and raises instead.

Writes are kept by address range, so that two views of one flat buffer are told
apart, and a view cannot hide a write. A saved array is alive as long as its
node, so a later write into its addresses is a write into it.
"""

import itertools
from bisect import bisect_left, bisect_right

from ..backend import byte_range, on_host, recording, refuse_in_graph

tick = itertools.count(1).__next__      # the clock


class WriteLog:
    """Disjoint address ranges in order, each with the date and author of its newest write."""

    def __init__(self):
        self.starts, self.stops, self.entries = [], [], []
        self.newest = 0     # date of the newest write anywhere: one comparison clears most nodes

    def add(self, array, author):
        """Note a write into every element of `array` by `author` (a name for the error message)."""
        bounds = byte_range(array)
        if bounds is not None:
            self.newest = date = tick()
            self._replace(*bounds, [(*bounds, (date, author))])
            if recording.graph is not None:
                if on_host(array):
                    refuse_in_graph(f"{author} on the cpu")
                recording.graph.writes.append((*bounds, author))

    def add_ranges(self, ranges):
        """Note writes into ranges of addresses [(first, last + 1, author)], of which each was noted before."""
        date = self.newest = tick()
        for start, stop, author in ranges:
            self._replace(start, stop, [(start, stop, (date, author))])

    def forget(self, array):
        """`array` is new memory, of which an unpacked value is to be made: what was written to its addresses before
        was written to something else. (A value that nobody packs needs this not: it is there before its node.)"""
        bounds = byte_range(array)
        if bounds is not None:
            self._replace(*bounds, [])

    def _replace(self, start, stop, pieces):
        i, j = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        if i < j:   # what the new range covers goes; what sticks out on either side stays
            if self.starts[i] < start:
                pieces.insert(0, (self.starts[i], start, self.entries[i]))
            if self.stops[j - 1] > stop:
                pieces.append((stop, self.stops[j - 1], self.entries[j - 1]))
        starts, stops, entries = zip(*pieces, strict=True) if pieces else ((), (), ())
        self.starts[i:j], self.stops[i:j], self.entries[i:j] = starts, stops, entries

    def since(self, array, date):
        """The newest (date, author) of a write into `array` after `date`, or None."""
        bounds = byte_range(array)
        if bounds is None:
            return None
        i, j = bisect_right(self.stops, bounds[0]), bisect_left(self.starts, bounds[1])
        if i >= j:
            return None
        newest = max(self.entries[i:j], key=lambda entry: entry[0])
        return newest if newest[0] > date else None


def merged(ranges):
    """Writes of one date [(first, last + 1, author)], later ones over earlier ones, as disjoint ranges in order;
    neighbours by one author are one."""
    log, found = WriteLog(), []
    log.add_ranges(ranges)
    for start, stop, (_, author) in zip(log.starts, log.stops, log.entries, strict=True):
        if found and found[-1][1:] == (start, author):
            start = found.pop()[0]
        found.append((start, stop, author))
    return found


log = WriteLog()


def wrote(array, author):
    """Tell the tape that `array` was written in place. Framework code calls this at each in-place write."""
    log.add(array, author)
