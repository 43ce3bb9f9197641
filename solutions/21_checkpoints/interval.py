"""21.5 How often: what checkpoints cost, and what they save.

A run needs `work` seconds of training. Whenever it has trained for `interval` seconds it saves, and stands still for
`pause` seconds. What was saved counts `behind` seconds after that has begun: behind = pause where training waits until
all is on the disk; where it is written beside the training (21.4) the pause is shorter, and behind is longer.

    train ─interval─▶ pause ─▶ train ─interval─▶ pause ─▶ train …
                      └──── behind ────▶ counts

When a machine fails, the run goes on, `restart` seconds later, from the newest checkpoint that counts, or from its
beginning; there it trains for an interval before it saves again.
"""

import math


def interval(pause, mtbf):
    """How many seconds of training between two saves lose least time, to first order (Young 1974).

    pause  seconds that a save costs; mtbf: mean time between failures, in seconds, and many times longer
    """
    # begin with what is lost per second of training: to saves, and to failures, each of which takes half an interval on
    # the average. At which interval is the sum least?
    return math.sqrt(2 * pause * mtbf)


def simulate(work, interval, pause, behind, restart, uptimes):
    """(seconds until all work is done, seconds of training that were lost and done again).

    uptimes  how many seconds the machine runs until it fails for the first time; from the restart's end until it fails
             for the second time; and so on. After the last it doesn't fail any more
    behind   at most interval + pause; at least pause

    When the work is done the run ends, without a save. What is done when the machine fails is done, and what counts
    from that moment on counts.
    """
    # begin with one uptime: how many saves are needed before what is left is done? Is it done before the failure? If
    # not, how many seconds have been trained, and how many checkpoints count?
    seconds = lost = saved = 0.0
    cycle = interval + pause
    for uptime in [*uptimes, math.inf]:
        left = work - saved
        needed = left + (math.ceil(left / interval) - 1) * pause
        if needed <= uptime:
            return seconds + needed, lost
        cycles, rest = divmod(uptime, cycle)
        trained = cycles * interval + min(rest, interval)
        kept = max(0, (uptime + pause - behind) // cycle) * interval
        saved, lost = saved + kept, lost + trained - kept
        seconds += uptime + restart
