# 21.5: event by event
import math


def interval(pause, mtbf):
    return math.sqrt(2 * pause * mtbf)


def simulate(work, interval, pause, behind, restart, uptimes):
    now = lost = saved = 0.0
    for uptime in [*uptimes, math.inf]:
        clock, done, counts = 0.0, saved, []
        while True:
            if work - done <= interval:
                if clock + work - done <= uptime:
                    return now + clock + work - done, lost
                done += max(0.0, min(uptime - clock, work - done))
                break
            if clock + interval > uptime:
                done += uptime - clock
                break
            clock, done = clock + interval, done + interval
            counts.append((clock + behind, done))
            clock += pause
            if clock > uptime:
                break
        newest = max([holds for when, holds in counts if when <= uptime], default=saved)
        lost, saved, now = lost + done - newest, newest, now + uptime + restart
