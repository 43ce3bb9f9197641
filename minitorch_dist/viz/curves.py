"""Learning curves of several runs, and whether they are one curve."""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .figure import drawn

# ---------------------------------------------------------------- runs


class RunError(ValueError):
    """A run that cannot be read, or runs that cannot be compared; the message says which and what to do."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one training run left behind: its folder's name, the loss at each step, and its summary.

    steps   int64 (n,), increasing
    losses  float64 (n,), of the global batch
    summary the contents of summary.json
    scores  None, or float64 (n,): attention's greatest score in each step, NaN where it isn't known (qk_clip.py)
    """

    name: str
    steps: np.ndarray
    losses: np.ndarray
    summary: dict
    scores: np.ndarray | None = None

    @property
    def label(self):
        ranks = self.summary.get("ranks", "?")
        return f"{ranks} rank{'s' * (ranks != 1)} · {textwrap.shorten(self.name[::-1], 40, placeholder='…')[::-1]}"


def read_run(folder):
    """The Run in the folder, from its history.jsonl and summary.json. Raises RunError."""
    history, summary = Path(folder) / "history.jsonl", Path(folder) / "summary.json"
    for path in (history, summary):
        if not path.is_file():
            raise RunError(f"{folder} is not a finished run: there is no {path}. "
                           f"Make it with: python mnist_demo/train.py --out {folder}")
    lines = history.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise RunError(f"{history} is empty: the run took no step. Train it again.")
    steps, losses, scores = zip(*(_read_line(history, number, line) for number, line in enumerate(lines, 1)),
                                strict=True)
    if (np.diff(steps) <= 0).any():
        at = int(np.argmax(np.diff(steps) <= 0)) + 2
        raise RunError(f"{history}, line {at}: step {steps[at - 1]} comes after step {steps[at - 2]}. "
                       f"Two runs seem to have written into one folder: train again into another.")
    try:
        facts = json.loads(summary.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{summary} is damaged or cut off ({error}). Train the run again.") from error
    if not isinstance(facts, dict):
        raise RunError(f"{summary} holds {type(facts).__name__} instead of an object. Train the run again.")
    return Run(str(folder), np.array(steps), np.array(losses, dtype=np.float64), facts,
               np.array(scores) if np.isfinite(scores).any() else None)


def _read_line(path, number, line):
    """(step, loss, the greatest score or NaN)."""
    try:
        record = json.loads(line)
        return int(record["step"]), float(record["loss"]), float(record.get("greatest_score", "nan"))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}, line {number} is damaged or cut off: {line[:60]!r}. The run was killed, or is not "
                       f"over yet: wait for it or train it again.") from error


# ---------------------------------------------------------------- the verdict

HEADLINES = {"identical": "IDENTICAL TO THE BIT", "within": "WITHIN TOLERANCE", "different": "DIFFERENT"}
SAME_JOB = ("data", "seed")     # runs that differ here were not meant to give one curve
SETTINGS = ("model", "hidden", "pieces", "dropout", "augment", "batch_size", "epochs", "optimizer", "lr",
            "weight_decay", "schedule", "warmup", "clip", "dtype", "amp", "exact", "micro_shards", "compile", "device")


@dataclass(frozen=True)
class Verdict:
    """Whether runs are one curve.

    kind        "identical" (every loss and the parameters' sha256 are equal), "within" (no loss differs by more than
                the tolerance) or "different"
    max_delta   the largest |Δloss| to the first run; inf where one loss is NaN and the other is not
    first_step  where they first differ by more than the tolerance, or one of them has no such step; None otherwise
    text        the sentence for people
    """

    kind: str
    max_delta: float
    first_step: int | None
    text: str


def deltas(reference, run):
    """(steps, |Δloss|) at the steps that both runs have. NaN against NaN is 0, NaN against a number is inf."""
    steps, at, there = np.intersect1d(reference.steps, run.steps, assume_unique=True, return_indices=True)
    ours, theirs = reference.losses[at], run.losses[there]
    equal = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        delta = np.where(equal, 0.0, np.abs(ours - theirs))
    return steps, np.where(np.isnan(delta), np.inf, delta)


def verdict(runs, tolerance=1e-4):
    """Compare each run with the first: the worst Verdict (the earliest DIFFERENT, else the largest |Δloss|).

    Raises RunError for runs of other data or another seed.
    """
    reference, *others = runs
    if not others:
        raise RunError("One run alone cannot be compared: name two or more.")
    found = [_compare(reference, run, tolerance) for run in others]
    different = [v for v in found if v.kind == "different"]
    if different:
        return min(different, key=lambda v: v.first_step)
    return max(found, key=lambda v: (v.kind == "within", v.max_delta))


def _compare(reference, run, tolerance):
    for key in SAME_JOB:
        ours, theirs = reference.summary.get(key), run.summary.get(key)
        if ours != theirs:
            raise RunError(f"{reference.name} and {run.name} are not the same job: {key} {ours!r} against {theirs!r}. "
                           f"Train one of them again.")
    steps, delta = deltas(reference, run)
    alone = np.setxor1d(reference.steps, run.steps)
    apart = np.concatenate([steps[delta > tolerance], alone])
    largest = float(delta.max(initial=0.0))
    if len(apart):
        first = int(apart.min())
        text = f"DIFFERENT from step {first}: {_how(reference, run, steps, delta, alone, first)}"
        text += f"; tolerance {_number(tolerance)}{_settings(reference, run)}"
        return Verdict("different", largest, first, text)
    hashes = [r.summary.get("parameters_sha256") for r in (reference, run)]
    count = f"over {len(steps):,} step{'s' * (len(steps) != 1)}"
    diverged = f"; but the loss is NaN from step {steps[lost.argmax()]}" if (lost := np.isnan(run.losses)).any() else ""
    if largest == 0 and None not in hashes and hashes[0] == hashes[1]:
        return Verdict("identical", largest, None,
                       f"IDENTICAL TO THE BIT: max |Δloss| = 0, parameters sha256 equal {count}{diverged}")
    bits = ""
    if largest == 0:
        bits = "; but not to the bit: parameters sha256 " + ("missing" if None in hashes else "differ")
    elif reference.summary.get("exact") and run.summary.get("exact") and not _settings(reference, run):
        ours, theirs = (r.summary.get("products_made_by") for r in (reference, run))
        bits = (f"; both runs are --exact, but products came of {ours}, and of {theirs}" if ours and theirs != ours else
                "; but both runs are --exact and should be identical to the bit")
    return Verdict("within", largest, None, f"WITHIN TOLERANCE: max |Δloss| = {_number(largest)} {count}, "
                   f"tolerance {_number(tolerance)}{bits}{diverged}")


def _how(reference, run, steps, delta, alone, first):
    """In what way the two come apart at step `first`."""
    so_far = f"max |Δloss| = {_number(delta[np.isfinite(delta)].max(initial=0.0))}"
    if first in alone:
        shorter, longer = (run, reference) if first in reference.steps else (reference, run)
        last = shorter.steps[-1]
        lack = f"ends at {last}" if first > last else "has not"
        return f"{longer.name} has this step, {shorter.name} {lack}; {so_far} where both have one"
    if np.isinf(delta[np.searchsorted(steps, first)]):
        lost = run if not np.isfinite(run.losses[np.searchsorted(run.steps, first)]) else reference
        return f"the loss of {lost.name} is {lost.losses[np.searchsorted(lost.steps, first)]}; elsewhere {so_far}"
    return f"{so_far} between {reference.name} and {run.name}"


def _number(value):
    """0, 8.6e-07, 1e-04, 0.43"""
    if value == 0 or value >= 0.01:
        return f"{value:.2g}"
    return f"{value:.1e}".replace(".0e", "e")


def _settings(reference, run):
    """The settings that were not alike, since they may be the reason."""
    unlike = [f"{key} {reference.summary[key]} / {run.summary[key]}" for key in SETTINGS
              if key in reference.summary and key in run.summary and reference.summary[key] != run.summary[key]]
    return f". The runs were set differently: {', '.join(unlike)}" if unlike else ""


# ---------------------------------------------------------------- the picture

THICK = {"color": "#f4a259", "lw": 5, "alpha": 0.75, "solid_capstyle": "round"}    # the reference
COLORS = ("#1d3557", "#2a9d8f", "#9b2c8f", "#6c757d")                               # the others
DASHES = ((0, (4, 2.5)), (3.2, (2, 4.5)), (0, (1, 2)), (0, (6, 2, 1, 2)))
GREEN, RED = "#2a7f4f", "#b3261e"
MOST_POINTS = 400   # of more, dashes run into one line


def curves(runs, path, tolerance=1e-4, title=None):
    """Draw the runs' losses and their differences from the first run into the file `path`; returns the Verdict.

    The first run is a thick pale line and the others are thin dashes above it, so that equal curves both show.
    Long runs are drawn in bins: the mean of the losses, but the largest difference. A title stands in the place of the
    verdict and its marks, for runs that aren't meant to be one curve.
    """
    judged = verdict(runs, tolerance)
    with drawn(path, (8.6, 5.2)) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
        size = -(-max(len(run.steps) for run in runs) // MOST_POINTS)
        _draw_losses(top, runs, size)
        _draw_deltas(bottom, runs, tolerance, size)
        bottom.set_xlabel("optimizer step" + (f"  (a point: {size} steps)" if size > 1 else ""))
        if title is None:
            _mark(top, bottom, judged.first_step, tolerance)
            _write_verdict(top, judged)
        else:
            top.set_title(title, loc="left", fontsize=11)
    return judged


def binned(steps, values, size, reduce):
    """Steps and values with `size` steps in one point. Bins lie at the same steps in every run."""
    starts = np.flatnonzero(np.diff((steps - 1) // size, prepend=-1))
    points = reduce.reduceat(values, starts)
    if reduce is np.add:
        points = points / np.diff(starts, append=len(steps))
    return steps[starts], points


def _draw_losses(axes, runs, size):
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
    for index, run in enumerate(runs):
        steps, losses = binned(run.steps, run.losses, size, np.add)
        few = {"marker": "o", "markersize": 3.5 if index else 7} if len(steps) <= 20 else {}
        thin = {"color": _color(index), "lw": 1.3, "ls": DASHES[(index - 1) % len(DASHES)]}
        axes.plot(steps, losses, label=run.label, **few, **(thin if index else THICK))
    if any((run.losses > 0).any() for run in runs):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="y", alpha=0.2)
    axes.set_ylabel("training loss\n(global batch)")
    axes.legend(frameon=False, loc="best", handlelength=3)


def _draw_deltas(axes, runs, tolerance, size):
    differences = [deltas(runs[0], run) for run in runs[1:]]
    finite = np.concatenate([delta[np.isfinite(delta)] for _, delta in differences])
    low, high, every = _decades(finite.max(initial=0.0), tolerance)
    ceiling = 10.0 ** (high + every / 2)
    for index, (steps, delta) in enumerate(differences, 1):
        if len(steps):
            steps, delta = binned(steps, np.minimum(delta, ceiling), size, np.maximum)
            axes.fill_between(steps, 0, delta, step="mid", color=_color(index), alpha=0.15, lw=0)
            axes.plot(steps, delta, color=_color(index), lw=1.2, drawstyle="steps-mid")
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.9 * every)
    powers = range(low, high + 1, every)
    axes.set_yticks([0, *(10.0**power for power in powers)])
    axes.set_yticklabels(["0", *(f"1e{power}" if power else "1" for power in powers)])
    axes.minorticks_off()
    axes.set_ylim(-0.15 * 10.0**low, ceiling)    # so that a line at 0 stands clear of the axis
    axes.grid(axis="y", alpha=0.2)
    axes.set_ylabel("|Δ loss|")


def _decades(largest, tolerance):
    """(low, high, every): linear from 0 to 10**low, then logarithmic to 10**high, with a tick at each `every` decades.

    The axis shows three decades below the largest difference and four below the tolerance.
    """
    shown = [value for value in (largest, tolerance, largest / 1e3, tolerance / 1e4) if value > 0] or [1e-4]
    low, high = int(np.floor(np.log10(min(shown)))), int(np.ceil(np.log10(max(shown))))
    every = max(1, -(-(high - low) // 4))
    return high - every * -(-(high - low) // every), high, every


def _mark(top, bottom, step, tolerance):
    """The tolerance, and the step from which on it is exceeded, or None."""
    if tolerance > 0:
        bottom.axhline(tolerance, color=RED, lw=1, ls=":")
    bottom.annotate(f"tolerance {_number(tolerance)}", (1, tolerance), xycoords=("axes fraction", "data"),
                    xytext=(0, 2), textcoords="offset points", ha="right", va="bottom", fontsize=9, color=RED,
                    bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1})
    if step is None:
        return
    for axes in (top, bottom):
        axes.axvline(step, color=RED, lw=1, alpha=0.6)
    top.annotate(f"step {step:,}", (step, 0), xycoords=("data", "axes fraction"), xytext=(4, 4),
                 textcoords="offset points", fontsize=9, color=RED)


def _write_verdict(axes, judged):
    """The headline, and under it the rest of the sentence, wrapped."""
    headline = HEADLINES[judged.kind]
    rest = textwrap.fill(judged.text.removeprefix(headline).removeprefix(":").strip(), 96, break_on_hyphens=False)
    lines = rest.count("\n") + 1
    axes.annotate(rest, (0, 1), xycoords="axes fraction", xytext=(0, 9), textcoords="offset points", va="bottom",
                  fontsize=10, color="#333333", linespacing=1.25)
    axes.set_title(headline, loc="left", pad=14 + 13.5 * lines, fontsize=14, fontweight="bold",
                   color=RED if judged.kind == "different" else GREEN)


def _color(index):
    return COLORS[(index - 1) % len(COLORS)]
