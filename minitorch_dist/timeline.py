"""What every rank did, from when to when.

    with mt.trace(world) as timeline:
        train_one_step()
    print(timeline)                                 # seconds of each rank, and how much communication was hidden
    timeline.save("trace.json")                     # for chrome://tracing and ui.perfetto.dev
    mt.viz.timeline(timeline, "timeline.png")       # all ranks in one picture
"""

import json
from contextlib import contextmanager
from pathlib import Path

from . import comm as communication
from . import ledger


class Timeline:
    """spans: for each rank its [ledger.Span], times in seconds since the beginning of the trace. Filled on all ranks at
    the end of `trace`."""

    def __init__(self):
        self.spans = []

    def seconds(self, rank):
        """{what: seconds} of one rank: each name on the compute track, then "communication" (the union of all
        operations on their way), of which "hidden" is the part that the rank did not wait for."""
        spans = self.spans[rank]
        names = dict.fromkeys(s.name for s in spans if s.track == "compute")
        totals = {name: length(union(s for s in spans if s.name == name and s.track == "compute")) for name in names}
        under_way = union(s for s in spans if s.track == "communication")
        waits = union(s for s in spans if s.name == "wait")
        totals["communication"] = length(under_way)
        totals["hidden"] = length(under_way) - length(intersection(under_way, waits))
        return totals

    def __str__(self):
        """A table: a row per rank, milliseconds."""
        rows = [self.seconds(rank) for rank in range(len(self.spans))]
        names = list(dict.fromkeys(name for row in rows for name in row))
        width = max(13, *map(len, names)) if names else 13
        lines = ["rank  " + "  ".join(f"{name:>{width}}" for name in names) + "   (ms)"]
        for rank, row in enumerate(rows):
            lines.append(f"{rank:4d}  " + "  ".join(f"{1e3 * row.get(name, 0):{width}.2f}" for name in names))
        return "\n".join(lines)

    def save(self, path):
        """Write the trace as Chrome-trace JSON: a process per rank, compute as a stack of slices (a second one beside,
        where two passes took turns), communication as asynchronous ones (several may be under way). Times in
        microseconds.

        Source: Google's "Trace Event Format" document.
        """
        events = []
        for rank, spans in enumerate(self.spans):
            events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
            rows = stacks(spans)
            events += [{"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": "compute"}}
                       for row in sorted({0, *rows.values()})]
            for number, s in enumerate(spans):
                common = {"name": s.name, "cat": s.track, "pid": rank, "tid": rows.get(number, 0),
                          "args": {"detail": s.detail}}
                if s.track == "compute":
                    events.append(common | {"ph": "X", "ts": 1e6 * s.begin, "dur": 1e6 * (s.end - s.begin)})
                else:
                    name, key = f"{s.name} ({s.detail})", f"{rank}.{number}"
                    events.append(common | {"name": name, "ph": "b", "id": key, "ts": 1e6 * s.begin})
                    events.append(common | {"name": name, "ph": "e", "id": key, "ts": 1e6 * s.end})
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


@contextmanager
def trace(comm=None):
    """Record when forward, backward, optimizer steps, waits and operations between ranks begin and end, on every rank
    of `comm` (default: the world). Collective; gives a Timeline, which is filled when the block ends.

    All ranks leave a barrier to begin, and count time from there: on one machine their clocks are one, over a network
    they are as far apart as the barrier lets ranks go, some tens of microseconds. An
    operation is there if it has been waited for inside. A block that raises gathers nothing.
    """
    comm = comm if comm is not None else communication.world()
    timeline = Timeline()
    comm.barrier()
    origin = ledger.clock()
    with ledger.record(timeline=True) as book:
        yield timeline
    mine = [s._replace(begin=max(0.0, s.begin - origin), end=s.end - origin) for s in book.spans]
    timeline.spans = [[ledger.Span(*s) for s in spans] for spans in comm.all_gather_object([tuple(s) for s in mine])]


def stacks(spans):
    """{number of a compute span: its row}: in each row any two lie apart, or one in the other."""
    rows, open_ends = {}, []        # of each row the ends of the spans that enclose what comes next
    compute = [(s.begin, -s.end, number) for number, s in enumerate(spans) if s.track == "compute"]
    for begin, end, number in sorted(compute):
        for ends in open_ends:
            while ends and ends[-1] <= begin:
                ends.pop()
        row = next((i for i, ends in enumerate(open_ends) if not ends or -end <= ends[-1]), len(open_ends))
        if row == len(open_ends):
            open_ends.append([])
        open_ends[row].append(-end)
        rows[number] = row
    return rows


# ---------------------------------------------------------------- sets of time, as sorted disjoint (begin, end)

def union(spans):
    """The time that any of the spans covers."""
    joined = []
    for begin, end in sorted((s.begin, s.end) for s in spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def intersection(a, b):
    """The time that both cover."""
    both = [(max(p[0], q[0]), min(p[1], q[1])) for p in a for q in b]
    return sorted((begin, end) for begin, end in both if begin < end)


def length(stretches):
    """Seconds in all."""
    return sum(end - begin for begin, end in stretches)
