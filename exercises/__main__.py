"""`python -m exercises`: see cli.py.

Who ends it, by Ctrl-C, SIGTERM or a closed terminal, ends the answers that it runs, too.
"""

import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:      # not under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        from .cli import main
    except KeyboardInterrupt:       # while modules load; else see main
        sys.exit(130)
    sys.exit(main())
