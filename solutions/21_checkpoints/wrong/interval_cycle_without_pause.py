# 21.5: a save comes every `interval` seconds here
import math


def interval(pause, mtbf):
    return math.sqrt(2 * pause * mtbf)


def simulate(work, interval, pause, behind, restart, uptimes):
    seconds = lost = saved = 0.0
    cycle = interval
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
