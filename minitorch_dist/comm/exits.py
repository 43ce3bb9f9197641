"""How the main program ends: by itself, or by a SystemExit and which."""

import gc
import sys
import threading
import traceback
import types


def when_main_ends(callback):
    """Call callback(error, where) as soon as the main program has ended: with the SystemExit that it ended by and the
    stack that raised it, or with (None, "").

    An atexit function can't find out: Python has forgotten the exception by then. But before it looks at it, Python
    flushes stderr, by a call that no Python code has made; and the exception is an object that nobody refers to.
    (`python script.py` does that; `python -m module` and `-c` don't, and then the callback isn't called. Python flushes
    stderr after an exception in an atexit function, too: the main thread counts as ended by then.)
    """
    if sys.stderr is None:
        return
    flush = sys.stderr.flush

    def flush_and_look():
        flush()
        main = threading.main_thread()
        if sys._getframe().f_back is None and threading.current_thread() is main and main.is_alive():
            error = _unheld(lambda o: isinstance(o, SystemExit))
            callback(error, "" if error is None else _stack(error))
    try:
        sys.stderr.flush = flush_and_look
    except AttributeError:   # not a usual stream
        pass


def raise_exit(status=None):
    """sys.exit, in Python. C's leaves it to whoever catches the exception to make an object of it (Python 3.11), so
    that when_main_ends would find none; and `sys.exit(main())` has looked up sys.exit before main() calls world()."""
    raise SystemExit(status)


def _unheld(wanted):
    """The object that `wanted` holds for and no other object refers to, or None."""
    found = [o for o in gc.get_objects() if wanted(o)]
    for o in found:
        if all(holder is found for holder in gc.get_referrers(o)):
            return o
    return None


def _stack(error):
    trace = error.__traceback__
    if trace is None:   # Python 3.11 keeps the two apart until somebody catches the exception
        trace = _unheld(lambda o: isinstance(o, types.TracebackType) and o.tb_frame.f_back is None)
    return "".join(traceback.format_tb(trace))
