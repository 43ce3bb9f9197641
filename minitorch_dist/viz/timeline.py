"""All ranks' timelines in one picture."""

from ..ledger import Span
from ..parallel.pipelines.schedule_steps import slices_of
from ..parallel.pipelines.schedules import NAMES, label
from ..timeline import Timeline
from .figure import drawn

COLORS = {"forward": "#4C78A8", "backward": "#F58518", "input gradient": "#F58518", "weight gradients": "#B5651D",
          "optimizer": "#54A24B", "wait": "#D9D9D9"}
OTHER, ON_THE_WIRE = "#B279A2", "#7B66D2"
LANE, GAP = 0.8, 0.35       # heights, in lanes


def timeline(traced, path, title="What each rank did", unit=None):
    """Draw a Timeline (mt.trace) into the file `path`: for each rank a lane of what it computed or waited for, and
    below it the operations between ranks, from posting to completion. unit: what times are in, if not in seconds."""
    if not any(traced.spans):
        raise ValueError("timeline: nothing was recorded; run a step inside of `with mt.trace(world) as timeline:`")
    lanes = [pack([s for s in spans if s.track == "communication"]) for spans in traced.spans]
    heights = [2 + max((lane for lane, _ in packed), default=-1) for packed in lanes]
    unit, scale = (unit, 1) if unit else _unit(max(s.end for spans in traced.spans for s in spans))
    with drawn(path, (11, 1.5 + 0.34 * (sum(heights) + len(heights)))) as figure:
        axes = figure.subplots()
        top, ticks, labels = 0.0, [], []
        for rank, (spans, packed, height) in enumerate(zip(traced.spans, lanes, heights, strict=True)):
            _compute_lane(axes, [s for s in spans if s.track == "compute"], top, scale, labels)
            for lane, s in packed:
                _bar(axes, s, top + 1 + lane, scale, ON_THE_WIRE, s.detail.rpartition(", ")[0] or s.name, labels)
            ticks.append((top + 0.5, f"rank {rank}"))
            top += height + GAP
        across = axes.get_xlim()[1] - axes.get_xlim()[0]
        for label, width in labels:     # text that is wider than its bar would lie over its neighbours
            label.set_visible(width / across > 0.008 * len(label.get_text()))
        axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
        axes.set_ylim(top, -0.2)
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)
        axes.set_title(title, loc="left")
        _legend(axes, {s.name for spans in traced.spans for s in spans if s.track == "compute"}, any(lanes))


def schedule(played, path, title):
    """Draw a pipeline's schedule as it was played (parallel/pipelines/schedules.py) into the file `path`."""
    made = Timeline()
    stages = [sorted({step.stage for *_, step in row}) for row in played.spans]
    slices = slices_of([step for *_, step in row] for row in played.spans)
    made.spans = [[Span("compute", NAMES[step.kind], begin, end, label(step, own, slices)) for begin, end, step in row]
                  for row, own in zip(played.spans, stages, strict=True)]
    timeline(made, path, title, "times of a forward")


def pack(spans):
    """[(lane, span)]: spans that overlap lie in lanes below each other, each in the first lane that is free."""
    packed, free = [], []
    for s in sorted(spans, key=lambda s: (s.begin, s.end)):
        lane = next((i for i, until in enumerate(free) if until <= s.begin), len(free))
        free[lane:lane + 1] = [s.end]
        packed.append((lane, s))
    return packed


def _compute_lane(axes, spans, top, scale, labels):
    for s in sorted(spans, key=lambda s: s.name == "wait"):        # what was waited for inside lies on top
        waits = s.name == "wait"
        _bar(axes, s, top, scale, COLORS.get(s.name, OTHER), s.name if waits else s.detail or s.name, labels,
             "////" if waits else None)


def _bar(axes, s, y, scale, color, text, labels, hatch=None):
    begin, width = s.begin * scale, (s.end - s.begin) * scale
    axes.barh(y + 0.5, width, left=begin, height=LANE, color=color, hatch=hatch, edgecolor="white", linewidth=0.6)
    label = axes.text(begin + width / 2, y + 0.5, text, ha="center", va="center", fontsize=7, clip_on=True,
                      color="#333333" if hatch else "white")
    labels.append((label, width))


def _unit(seconds):
    """(name of the unit, how many of it a second has) for times up to so many seconds."""
    for name, count in (("seconds", 1), ("milliseconds", 1e3)):
        if seconds * count >= 1:
            return name, count
    return "microseconds", 1e6


def _legend(axes, names, communication):
    from matplotlib.patches import Patch
    shown = [name for name in COLORS if name in names] + sorted(names - COLORS.keys())
    handles = [Patch(facecolor=COLORS.get(name, OTHER), hatch="////" if name == "wait" else None, edgecolor="white",
                     label=name) for name in shown]
    if communication:
        handles.append(Patch(facecolor=ON_THE_WIRE, label="on the wire, from posting to completion"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(handles), frameon=False)
