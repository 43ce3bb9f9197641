"""The learner's schedules over time: stages down, boxes for forwards and backwards, the bubble shaded."""

from exercises.frame.pictures import COLORS, canvas, save

from . import simulator

TITLES = {"gpipe": "gpipe", "one_forward_one_backward": "one forward, one backward"}
BUBBLE = {"color": "#f1e3c8", "hatch": "////", "edgecolor": "#e0c48f", "lw": 0}
SHADES = {"F": COLORS[0], "B": COLORS[1]}


def draw_schedules(got, path):
    """Both schedules of one case into a file; a sentence about them."""
    figure, panels = canvas(2, 1, size=(9, 4.8), sharex=True)
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        end = draw(axes, got[name])
        axes.set_title(f"{title}: the bubble is {100 * bubble(got[name]):.0f} % of the time", loc="left")
        axes.set_xlim(0, end + 2.6)
    for kind, text in (("F", "forward"), ("B", "backward")):
        panels[0].barh(0, 0, color=SHADES[kind], label=text)
    panels[0].barh(0, 0, label="waits", **BUBBLE)
    panels[0].legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    panels[-1].set_xlabel("time, in forwards of one micro-batch")
    save(figure, path)
    held = {name: [simulator.live(row) for row in got[name]] for name in TITLES}
    return (f"your two schedules: the same bubble, {100 * bubble(got['gpipe']):.0f} %, and on stage 0 "
            f"{held['one_forward_one_backward'][0]} micro-batches held in place of {held['gpipe'][0]}")


def bubble(rows):
    spans, _ = simulator.play(rows)
    return 1 - sum(end - begin for row in spans for begin, end, *_ in row) / (len(rows) * simulator.end_of(rows))


def draw(axes, rows):
    """One schedule; its end."""
    spans, end = simulator.play(rows)[0], simulator.end_of(rows)
    for stage, row in enumerate(spans):
        axes.barh(stage, end, height=0.8, zorder=1, **BUBBLE)
        for begin, until, kind, k in row:
            axes.barh(stage, until - begin, left=begin, height=0.8, color=SHADES[kind], edgecolor="white", zorder=2)
            axes.text((begin + until) / 2, stage, str(k), ha="center", va="center", fontsize=8, color="white", zorder=3)
        axes.text(end + 0.3, stage, f"holds {simulator.live(rows[stage])}", va="center", fontsize=8)
    axes.set(yticks=range(len(rows)), yticklabels=[f"stage {stage}" for stage in range(len(rows))],
             ylim=(len(rows) - 0.4, -0.6))
    axes.grid(False)
    return end
