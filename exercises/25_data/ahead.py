"""25.5 Reading ahead.

To read a batch takes time, and so does the step that trains on it. A thread can read the next batches meanwhile, so
that the step finds its own there, unless reading takes longer on average:

    the loop      ┌ waits ┐┌── step 0 ──┐┌── step 1 ──┐┌── step 2 ──┐
    the thread    └ read 0 ┘ read 1  read 2 ┘  read 3 ┘   read 4          depth 2

It must not read any further than that, for batches wait in memory. And a thread has traps of its own: what it raises
nobody hears, and who leaves the loop early, because the run is over or has failed, must not leave the thread behind.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    """An iterator over the same batches, in the same order, of which a thread reads up to `depth` before their turn:

        for batch in ahead(batches, 2): …

    batches   an iterator: next(batches) reads one, and may take long. Two threads at once must not call it. A batch may
              be anything but an exception, None too; it is handed on uncopied, and isn't kept
    depth     1 or more. When k batches have been asked for, at most k + depth reads have begun, and while the loop
              works on the k-th all of these begin. Nothing is read before the first batch is asked for
    an error  that next(batches) raises, SystemExit too, comes out where its batch would have been; behind it is the end
    the end   leaves no thread, and comes again if it is asked for again
    close()   as a generator has it: the loop is left. No read begins any more, and it returns when the thread has
              ended, which may be reading. `break` doesn't call it, but drops the iterator, and that does the same
    """
    raise NotImplementedError("begin with how the thread hands over a batch, an error, or the end, so that the three "
                              "can be told apart; then with what it waits for before it reads, rather than with what "
                              "it has read; last with how it hears that the loop is left: a generator has its "
                              "`finally` for that")
