# 21.5: a checkpoint that counts from the moment of the failure on
import math


def interval(pause, mtbf):
    return math.sqrt(2 * pause * mtbf)


def simulate(work, interval, pause, behind, restart, uptimes):
    seconds = lost = saved = 0.0
    cycle = interval + pause
    for uptime in [*uptimes, math.inf]:
        left = work - saved
        needed = left + (math.ceil(left / interval) - 1) * pause
        if needed <= uptime:
            return seconds + needed, lost
        cycles, rest = divmod(uptime, cycle)
        trained = cycles * interval + min(rest, interval)
        kept = max(0, math.ceil((uptime + pause - behind) / cycle) - 1) * interval
        saved, lost = saved + kept, lost + trained - kept
        seconds += uptime + restart
