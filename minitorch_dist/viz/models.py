"""Pictures of trained models: learning curve, filters, attention maps, confusion matrix, text with its surprise.

Each takes arrays or tensors, of any device, and writes one file; PNG, SVG or PDF by the name's ending.
"""

import numpy as np

from .curves import COLORS, MOST_POINTS, binned
from .figure import drawn, host_values

INK = COLORS[0]


def learning_curve(run, path):
    """The training loss of one Run (see read_run), and its validation losses where its summary holds
    `validation` [(step, loss) …]; in nats, as cross-entropy is. Below it attention's greatest scores, where they are
    known, beside the summary's `qk_clip`."""
    from matplotlib.ticker import MaxNLocator
    heights = [2] if run.scores is None else [2, 1]
    with drawn(path, (8.6, 2 + 2 * len(heights))) as figure:
        axes, *below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
        size = -(-len(run.steps) // MOST_POINTS)
        steps, losses = binned(run.steps, run.losses, size, np.add)
        axes.plot(steps, losses, color="#f4a259", lw=1.6, label="training, each step" if size == 1 else
                  f"training, mean of {size} steps")
        if validation := run.summary.get("validation"):
            at, values = np.array(validation).T
            axes.plot(at, values, color=INK, lw=1.4, marker="o", markersize=3.5, label="validation")
            axes.annotate(f"{values[-1]:.3g}", (at[-1], values[-1]), xytext=(4, 6), textcoords="offset points",
                          color=INK, fontsize=9.5, ha="right")
        for last in below:
            _draw_scores(last, run, size)
        ([axes] + below)[-1].set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats)")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="y", alpha=0.2)
        axes.legend(frameon=False)
        axes.set_title(f"{run.summary.get('data', '')} · {run.label}", loc="left", fontsize=11)


def _draw_scores(axes, run, size):
    """The greatest of each point's steps, and the threshold above which heads are clipped, where it is on the axis."""
    known = np.isfinite(run.scores)
    axes.plot(*binned(run.steps[known], run.scores[known], size, np.maximum), color="#9b2c8f", lw=1.2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    threshold = run.summary.get("qk_clip")
    if threshold is not None and threshold < high:
        axes.set_ylim(min(low, threshold / 1.5), max(high, threshold * 1.5))
        axes.axhline(threshold, color=INK, lw=1, ls=":")
        axes.annotate(f"clipped to {threshold:g}", (1, threshold), xycoords=("axes fraction", "data"), xytext=(-2, 3),
                      textcoords="offset points", color=INK, fontsize=9, ha="right", va="bottom")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.grid(axis="y", alpha=0.2)
    axes.set_ylabel("greatest score\nof attention")


def filters(weight, path, most=64):
    """The kernels of a convolution's weight (out, in, kh, kw), a row of `in` small images per output, red for
    positive and blue for negative, one scale for all; at most `most` images."""
    weight = host_values(weight)
    if weight.ndim != 4:
        raise ValueError(f"filters: a weight of shape {weight.shape}; a 2-d convolution's is (out, in, kh, kw)")
    out, inside = weight.shape[:2]
    columns = inside if inside > 1 else min(out, 8)
    images = weight.reshape(-1, *weight.shape[2:])[:max(columns, most // columns * columns)]
    rows, (height, width) = -(-len(images) // columns), images.shape[1:]
    # One image of all, for axes of their own take seconds to draw; the gaps are a fifth of a filter.
    zoom, gap = 5, max(height, width)
    mosaic = np.full((rows * (zoom * height + gap) - gap, columns * (zoom * width + gap) - gap), np.nan)
    for i, image in enumerate(images):
        top, left = i // columns * (zoom * height + gap), i % columns * (zoom * width + gap)
        mosaic[top:top + zoom * height, left:left + zoom * width] = image.repeat(zoom, 0).repeat(zoom, 1)
    with drawn(path, (max(4, 0.75 * columns + 1.2), max(1.8, 0.75 * rows + 0.6))) as figure:
        reach = np.abs(images).max() or 1
        axes = figure.subplots()
        axes.axis("off")
        shown = axes.imshow(mosaic, cmap="RdBu_r", vmin=-reach, vmax=reach, interpolation="nearest")
        figure.colorbar(shown, ax=axes, shrink=0.8, aspect=30, label="weight")
        title = f"{out} filters over {inside} channel{'s' * (inside > 1)}"
        title += f", {len(images)} of {out * inside} shown" if len(images) < out * inside else ""
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def attention_maps(weights, path, labels=None, title="", sources=None):
    """Where each position looks: weights (heads, time, sources), rows adding up to 1; `labels` names the positions
    (a string of as many characters, or a list), `sources` what they look at, where that is another sequence; `title`
    stands before the number of the first head."""
    weights = host_values(weights)
    if weights.ndim != 3:
        raise ValueError(f"attention_maps: weights of shape {weights.shape}; expected (heads, time, sources)")
    with drawn(path, (2.6 * len(weights) + 1, 3.1)) as figure:
        grid = figure.subplots(1, len(weights), squeeze=False, sharey=True)[0]
        for head, (axes, image) in enumerate(zip(grid, weights, strict=True)):
            square = image.shape[0] == image.shape[1]       # else few rows would be too flat for their names
            shown = axes.imshow(image, cmap="Purples", vmin=0, vmax=1, aspect="equal" if square else "auto")
            axes.set_title(f"{title}, head {head}" if title and not head else f"head {head}", fontsize=10)
            axes.set_xlabel("looks at")
            if labels is not None:
                for n, ticks, names in ((image.shape[1], axes.set_xticks, labels if sources is None else sources),
                                        (image.shape[0], axes.set_yticks, labels)):
                    ticks(range(n), ["␣" if c == " " else "⏎" if c == "\n" else c for c in names[:n]], fontsize=7)
        grid[0].set_ylabel("position")
        figure.colorbar(shown, ax=grid, shrink=0.7, label="weight")


def confusion_matrix(labels, predictions, path, classes=10):
    """How often each class (row) is taken for each (column); counts written in, errors coloured. Returns the counts,
    int64 (classes, classes). ValueError for what is none of the classes 0 to classes - 1, and where
    labels and predictions differ in shape."""
    pairs = host_values(labels), host_values(predictions)
    if pairs[0].shape != pairs[1].shape:
        raise ValueError(f"confusion_matrix: {pairs[0].shape} labels and {pairs[1].shape} predictions; one of each per "
                         "sample")
    for name, values in zip(("labels", "predictions"), pairs, strict=True):
        if values.size and not 0 <= values.min() <= values.max() < classes:
            raise ValueError(f"confusion_matrix: {name} from {values.min()} to {values.max()}, where classes are 0 to "
                             f"{classes - 1}: leave out what has no class")
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, pairs, 1)
    errors = np.where(np.eye(classes, dtype=bool), 0, counts)
    with drawn(path, (5.4, 5.2)) as figure:
        axes = figure.subplots()
        axes.imshow(errors, cmap="OrRd", vmin=0, vmax=max(1, errors.max()))
        for (row, column), count in np.ndenumerate(counts):
            right = row == column
            dark = errors[row, column] > 0.6 * errors.max() and not right
            axes.text(column, row, f"{count:,}" if count else "·", ha="center", va="center", fontsize=8,
                      color="white" if dark else INK if count else "#bbbbbb", fontweight="bold" if right else "normal")
        axes.set_xticks(range(classes))
        axes.set_yticks(range(classes))
        axes.set_xlabel("taken for")
        axes.set_ylabel("is")
        right = np.trace(counts)
        axes.set_title(f"{right:,} of {counts.sum():,} right ({100 * right / max(1, counts.sum()):.2f} %)", loc="left",
                       fontsize=11)
    return counts


def text_surprise(text, probabilities, path, width=72, note=""):
    """A text, each character on a ground the darker the less the model expected it; probabilities (len(text),), NaN
    for characters that it was given: they stay white and count for nothing. `note` is a line under the title."""
    probabilities = host_values(probabilities)
    if not text or len(text) != len(probabilities):
        raise ValueError(f"text_surprise: {len(text)} characters and {len(probabilities)} probabilities")
    places, row, column = [], 0, 0
    for c in text:
        if column == width:
            row, column = row + 1, 0
        places.append((row, column))
        row, column = (row + 1, 0) if c == "\n" else (row, column + 1)

    surprise = -np.log(np.maximum(probabilities, 1e-12))
    columns = max((column for _, column in places), default=0) + 1
    with drawn(path, (max(2.6, 0.118 * (columns + 2)), 0.7 + 0.2 * bool(note) + 0.21 * (places[-1][0] + 2))) as figure:
        from matplotlib.patches import Rectangle
        axes = figure.subplots()
        for c, (r, k), s in zip(text, places, surprise, strict=True):
            if not np.isnan(s):
                axes.add_patch(Rectangle((k - 0.5, r - 0.5), 1, 1, color="#e76f51", alpha=min(1.0, s / 6), lw=0))
            axes.text(k, r, "⏎" if c == "\n" else c, family="monospace", fontsize=8, ha="center", va="center",
                      color=INK)
        axes.set_xlim(-1, columns)
        axes.set_ylim(places[-1][0] + 0.8, -0.8)
        axes.axis("off")
        axes.set_title("\n".join([f"{np.nanmean(surprise):.2f} nats per character", "the darker, the less expected",
                                  *([note] if note else [])]), loc="left", fontsize=10)
