"""A backward pass and its messages over time, for the picture of 09.2."""

from exercises.frame.pictures import COLORS, canvas, save


def draw_both(inputs, sent, seconds, late, path):
    """The learner's pass over one that posts everything at the end.

    sent           [(begin, end)] on the wire, per bucket
    seconds, late  how long the two passes take
    """
    figure, (above, below) = canvas(2, 1, size=(9, 4.6), sharex=True)
    draw(above, inputs, sent)
    above.set_title(f"yours: {1e3 * seconds:.0f} ms", loc="left")
    queue, free = [], sum(inputs["costs"])
    for begin, end in sent:
        queue.append((free, free + end - begin))
        free = queue[-1][1]
    draw(below, inputs, queue)
    below.set_title(f"everything posted at the end: {1e3 * late:.0f} ms", loc="left")
    below.set_xlabel("simulated milliseconds")
    save(figure, path)


def draw(axes, inputs, sent):
    """A lane of gradients being worked out, and one of buckets on the wire."""
    at = 0.0
    of = {i: k for k, bucket in enumerate(inputs["buckets"]) for i in bucket}
    for i in inputs["orders"][0]:
        bar(axes, 1, at, at + inputs["costs"][i], COLORS[of[i]], f"g{i}")
        at += inputs["costs"][i]
    for k, (begin, end) in enumerate(sent):
        bar(axes, 0, begin, end, COLORS[k], f"bucket {k}")
    axes.set_yticks([1, 0], ["backward", "on the wire"])
    axes.set_ylim(-0.6, 1.6)


def bar(axes, y, begin, end, color, text):
    axes.barh(y, 1e3 * (end - begin), left=1e3 * begin, height=0.7, color=color, edgecolor="white")
    axes.text(500 * (begin + end), y, text, ha="center", va="center", fontsize=8, color="white")
