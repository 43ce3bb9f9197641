"""The chapter's pictures, from the learner's own outputs."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save

from . import slicing

KIB = 1024


def memory(case, got, path):
    """19.1: the most memory at a time, for sequences of several lengths."""
    figure, axes = canvas(size=(8.6, 4.4))
    keys = np.array(case["blocks"]) * case["block"]
    for name, label, color in (("at_once", "your attend, all keys at once", COLORS[1]),
                               ("pieces", f"your attention, {case['block']} keys at a time", COLORS[0])):
        axes.plot(keys, np.array(got[name]) / KIB, "o-", color=color, lw=1.8, label=label)
    axes.set(xlabel="keys", ylabel=f"KiB at a time, {case['queries']} queries", ylim=(0, None))
    axes.legend(frameon=False)
    save(figure, path)
    at_once, pieces = (np.array(got[name]) / KIB for name in ("at_once", "pieces"))
    return (f"{case['queries']} queries and {keys[-1]} keys: {at_once[-1]:,.0f} KiB all at once, {pieces[-1]:,.0f} KiB "
            f"in pieces; with {keys[0]} keys it is {at_once[0]:,.0f} and {pieces[0]:,.0f}")


def ring(case, got, path):
    """19.3: when the ranks worked on whose keys, and when messages were under way."""
    figure, axes = canvas(size=(8.6, 1.4 + 0.8 * len(got)))
    zero = min(call["begin"] for rank in got for call in rank.calls)
    forward = [[call for call in rank.calls if call["begin"] < rank["turn"] and "send" in call["op"]] for rank in got]
    for number, (rank, calls) in enumerate(zip(got, forward, strict=True)):
        for begin, end, whose in rank["work"]:
            axes.barh(number, 1e3 * (end - begin), 0.5, left=1e3 * (begin - zero), color=COLORS[whose % len(COLORS)])
        for call in calls:
            axes.plot([1e3 * (call["begin"] - zero), 1e3 * (call["end"] - zero)], [number - 0.36] * 2, color=COLORS[5],
                      lw=3, solid_capstyle="butt")
    for whose in range(len(got)):
        axes.barh(0, 0, color=COLORS[whose], label=f"keys of rank {whose}")
    axes.plot([], [], color=COLORS[5], lw=3, label="a message under way")
    axes.set(xlabel="milliseconds of forward", yticks=range(len(got)), ylim=(len(got) - 0.5, -0.6),
             yticklabels=[f"rank {rank}" for rank in range(len(got))])
    axes.legend(frameon=False, ncols=len(got) + 1, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    axes.grid(False)
    save(figure, path)
    bytes_of = sum(call["bytes"] for call in forward[0])
    back = sum(call["bytes"] for call in got[0].calls if call["begin"] >= got[0]["turn"] and "send" in call["op"])
    return (f"{len(got)} ranks: each sends {bytes_of / KIB:,.0f} KiB forward and {back / KIB:,.0f} KiB backward, to "
            "one neighbour; in forward each message is under way while its sender computes")


def in_order(n):
    """[[products of parts in each step] for each rank] with positions in order, and the ring of 19.3 left as it is."""
    return [[3 if step == 0 else 4 * (step <= rank) for step in range(n)] for rank in range(n)]


def balance(found, losses, library, path):
    """19.4: who multiplies how much in which step, in order and zigzag; and the curve of the training run."""
    n = len(found)
    figure, axes = canvas(1, 3, size=(11, 3.6), width_ratios=(1, 1, 1.3))
    total = {}
    for panel, (name, work) in zip(axes, (("in order", in_order(n)), ("your zigzag", found)), strict=False):
        waits = np.max(work, axis=0)
        total[name] = waits.sum()
        begins = np.concatenate([[0], np.cumsum(waits)])
        for rank in range(n):
            panel.barh([rank] * n, work[rank], 0.6, left=begins[:-1], color=[COLORS[step % len(COLORS)]
                                                                             for step in range(n)])
        panel.set_title(f"{name}: {total[name]:g}", loc="left", size=10)
        panel.set(yticks=range(n), yticklabels=[f"rank {rank}" for rank in range(n)], ylim=(n - 0.5, -0.5),
                  xlim=(0, sum(np.max(in_order(n), axis=0))), xlabel="products of parts, step by step")
        panel.grid(False)
    steps = range(1, len(losses) + 1)
    axes[2].plot(steps, library, color="#bcd4e6", lw=7, label="the library, one process")
    axes[2].plot(steps, losses, color=COLORS[1], lw=1.6, label=f"your attention, {n} ranks")
    axes[2].set(xlabel="step", ylabel="loss")
    axes[2].xaxis.get_major_locator().set_params(integer=True)
    axes[2].legend(frameon=False)
    save(figure, path)
    far = np.abs(np.subtract(losses, library)).max()
    return (f"a GPT trained on {n} ranks with all of your pieces: the library's curve, max |Δ| = {far:.0e}; a round of "
            f"the ring takes as long as {total['your zigzag']:g} products of parts, and {total['in order']:g} in order")


def choice(case, got, curves, path):
    """19.5: the losses of the training run, and which blocks each query of one sequence has chosen in its last step."""
    figure, (left, right) = canvas(1, 2, size=(10.4, 4.4), width_ratios=(1.25, 1))
    size, count, losses = case["size"], case["count"], got["losses"]
    chosen, steps = np.asarray(got["chosen"], bool), np.arange(1, len(got["losses"]) + 1)
    time = len(chosen)
    left.plot(steps, curves["window"], color=COLORS[5], lw=1.6, ls="--", label=f"the last {size * count} keys")
    left.plot(steps, losses, color=COLORS[1], lw=2, label=f"your {count} blocks of {size}")
    left.plot(steps, curves["all"], color=COLORS[0], lw=1.6, label="all keys")
    left.set(xlabel="step", ylabel="loss of the half that comes again", ylim=(0, None))
    left.legend(frameon=False)
    right.imshow(chosen, cmap="Blues", vmax=1.4, aspect="auto", extent=(0, chosen.shape[1] * size, time, 0))
    half = (time + 1) // 2
    asked = np.arange(half, time)
    needed = asked - half + 1
    right.plot(needed + 0.5, asked + 0.5, "o", color=COLORS[1], ms=2.5, label="the key that it needs")
    right.set(xlabel="key", ylabel="query", title="blocks that were chosen")
    right.legend(frameon=False, loc="upper right")
    right.grid(False)
    save(figure, path)
    found = chosen[asked, needed // size].mean()
    scores = int((chosen.sum(0) * np.minimum(size, time - size * np.arange(chosen.shape[1]))).sum())
    return (f"a sequence that comes again: after {len(losses)} steps the loss is {losses[-1]:.2f} with your {count} "
            f"blocks of {size}, {curves['all'][-1]:.2f} with all keys and {curves['window'][-1]:.2f} with the last "
            f"{size * count}; {found:.0%} of the queries that need a key have chosen its block. That took {scores:,} "
            f"scores, not {time ** 2:,}")


def slices(measured, path):
    """19.6: a pipeline in time, with whole sequences and in slices; what its ranks hold, and what each slice takes.

    measured  [(case, got)] of a long sequence, and of the pipeline's ranks with whole sequences, and with slices
    """
    (long, row), *pipelines = [(case, got["metered"]) for case, got in measured]
    figure, panels = canvas(3, 2, size=(11, 7.4), width_ratios=(3.2, 1), height_ratios=(1, 1, 1.1))
    titles = "whole sequences", f"in {slicing.SLICES} slices"
    spans = [slicing.play(case["slices"]) for case, _ in pipelines]
    ends = [max(done[-1][1] for done in of) for of in spans]
    most = [[max(rank["held"]) / KIB for rank in rows] for _, rows in pipelines]
    for (time, memory), of, held, title, end in zip(panels, spans, most, titles, ends, strict=False):
        over_time(time, of)
        time.set_title(f"{title}: the bubble is {100 * (1 - 3 * slicing.BATCHES / end):.0f} %", loc="left", size=10)
        time.set(xlim=(0, ends[0]), yticklabels=[f"rank {rank}" for rank in range(len(of))])
        memory.barh(range(len(held)), held, 0.8, color=COLORS[5])
        for rank, kib in enumerate(held):
            memory.text(kib, rank, f" {kib:,.0f}", va="center", fontsize=8)
        memory.set_title("your attention holds, KiB", loc="left", size=10)
        memory.set(xlim=(0, 1.25 * max(most[0])), yticks=[], ylim=time.get_ylim())
        memory.grid(False)
    panels[0][0].text(ends[0], -0.9, "pale: forward; numbers: micro-batches", ha="right", fontsize=8)
    below, triangle = panels[2]
    for (_, rows), of, title, color in zip(pipelines, spans, titles, COLORS, strict=False):
        below.step([0, *[end for _, end, *_ in of[0]]], [0, *rows[0]["held"] / KIB], where="post", color=color, lw=1.6,
                   label=title)
    below.set(xlim=(0, ends[0]), ylim=(0, None), xlabel="time, in forwards of a sequence", ylabel="rank 0 holds, KiB")
    count, peaks = long["slices"], row[0]["peaks"] / KIB
    for label, of_each, color in (("forward", peaks[:count], COLORS[0]), ("backward", peaks[:count - 1:-1], COLORS[1])):
        triangle.step(range(count), of_each, where="mid", color=color, lw=1.6, label=label)
    triangle.set(xlabel=f"slice of a sequence of {count * long['length']}", ylabel="KiB at a time", ylim=(0, None))
    for panel in panels[2]:
        panel.legend(frameon=False)
    save(figure, path)
    return (f"{slicing.RANKS} ranks and {slicing.BATCHES} micro-batches: {ends[0]:g} forwards of a sequence, and "
            f"{ends[1]:g} in {slicing.SLICES} slices; your attention holds {most[0][0]:,.0f} KiB on rank 0, and "
            f"{most[1][0]:,.0f} in slices")


def over_time(axes, spans):
    """What ranks do (slicing.play): a colour for each micro-batch, pale in forward."""
    for rank, done in enumerate(spans):
        for begin, end, kind, k, _ in done:
            axes.barh(rank, end - begin, 0.8, left=begin, color=COLORS[k], alpha=0.5 if kind == "F" else 1,
                      edgecolor="white", lw=0.6)
            if end - begin > 0.3:
                axes.text((begin + end) / 2, rank, str(k), ha="center", va="center", fontsize=7, color="white")
    axes.set(yticks=range(len(spans)), ylim=(len(spans) - 0.5, -0.5))
    axes.grid(False)
