# 21.5: a recursion over the uptimes; the exponential of a logarithm
import math


def interval(pause, mtbf):
    return math.exp((math.log(2 * pause) + math.log(mtbf)) / 2)


def simulate(work, interval, pause, behind, restart, uptimes):
    saves = -int(-work // interval) - 1
    needed = work + saves * pause
    if not len(uptimes) or needed <= uptimes[0]:
        return needed, 0.0
    first, *more = uptimes
    whole = int(first // (interval + pause))
    trained = interval * whole + min(interval, first - whole * (interval + pause))
    kept = len([k for k in range(1, saves + 1) if k * interval + (k - 1) * pause + behind <= first]) * interval
    seconds, lost = simulate(work - kept, interval, pause, behind, restart, more)
    return first + restart + seconds, trained - kept + lost
