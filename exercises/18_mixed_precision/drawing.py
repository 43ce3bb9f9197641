"""The chapter's pictures, from the learner's own outputs."""

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save

SMALLEST, NORMAL, END = -24, -14, 16      # float16's, as powers of 2
LOSING = ("float16", "bfloat16")      # formats that lose updates
BINS = np.arange(-52, END + 2)


def exponents(runs, path):
    """Gradients as they are and scaled: {power of the scale: (float32, rounded by the learner)}, in a histogram."""
    figure, axes = canvas(2, 1, size=(8.6, 5.6), sharex=True, sharey=True)
    lost = {}
    for panel, (power, (exact, rounded)) in zip(axes, runs.items(), strict=True):
        lost[power] = 100 * np.mean(rounded == 0)
        panel.axvspan(SMALLEST, NORMAL, color=COLORS[4], alpha=0.25, lw=0, label="float16, subnormal")
        panel.axvspan(NORMAL, END, color=COLORS[2], alpha=0.2, lw=0, label="float16")
        sizes = np.log2(np.abs(exact))
        panel.hist(sizes, BINS, color=COLORS[1], label="your round_to: 0")
        panel.hist(sizes[rounded != 0], BINS, color=COLORS[0], label="your round_to: not 0")
        panel.set_title(f"the loss {f'times 2^{power}' if power else 'as it is'}: {lost[power]:.2g} % of "
                        f"{len(exact):,} become 0", loc="left", size=10)
        panel.set_ylabel("gradients")
    axes[0].legend(frameon=False, loc="upper left", fontsize=8)
    axes[1].set_xlabel("log₂ of a gradient")
    save(figure, path)
    subnormal = 100 * np.mean(np.abs(runs[0][0]) < 2.0 ** NORMAL)
    scaled = max(lost)
    return (f"of the gradients of a network that reads digits, float16 loses {lost[0]:.0f} %, and {subnormal:.0f} % "
            f"lie below its normal numbers; with the loss times 2^{scaled} it loses {lost[scaled]:.2g} %")


def scaled_training(case, got, path):
    """18.2's training: losses in float32, in float16 without and with the learner's scaler, and its factor."""
    figure, (above, below) = canvas(2, 1, size=(8.6, 5.6), sharex=True, height_ratios=(2, 1))
    first, count = got[0], case[0]["count"]
    names = {"float32": ("float32", COLORS[2], 5), "float16": ("float16", COLORS[1], 1.6),
             "losses": ("float16 with your GradScaler", COLORS[0], 1.6)}
    for name, (label, color, width) in names.items():
        above.plot(first[name], color=color, lw=width, label=label, alpha=0.5 if width > 2 else 1)
    above.set(ylabel="loss per sample", yscale="log")
    above.legend(frameon=False)
    factors, left_out = np.log2(first["factors"]), np.flatnonzero(first["left_out"])
    below.step(range(len(factors)), factors, color=COLORS[0], where="post", lw=1.6)
    below.plot(left_out, factors[left_out], "x", color=COLORS[1], label="step left out")
    below.set(xlabel="step", ylabel="log₂ of your factor")
    below.legend(frameon=False)
    save(figure, path)
    end = {name: np.mean(first[name][-5:]) for name in names}
    return (f"a loss divided by 2^{int(np.log2(count))} samples: {end['float32']:.2f} after {len(factors)} steps in "
            f"float32, {end['float16']:.2f} in float16, {end['losses']:.2f} with your scaler, which has left out "
            f"{len(left_out)} steps")


def mixed_training(case, got, path):
    """18.3's training: losses with parameters of one format alone, and with the learner's masters; and what is lost."""
    figure, (above, below) = canvas(2, 1, size=(8.6, 5.6), sharex=True, height_ratios=(2, 1))
    names = {"float32": ("float32 parameters", COLORS[2], 5), "bfloat16": ("bfloat16 alone", COLORS[4], 1.6),
             "mine": ("float16, and your masters", COLORS[0], 2.4), "float16": ("float16 alone", COLORS[1], 1.2)}
    for name, (label, color, width) in names.items():
        above.plot(smooth(got[name]["losses"]), color=color, lw=width, label=label, alpha=0.5 if width > 4 else 1)
        if name in LOSING:
            below.plot(100 * np.array(got[name]["lost"]), color=color, lw=1.6)
    above.set(ylabel="loss, mean of 10 steps")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel="updates lost, %", ylim=(0, 100))
    below.set_title("without masters: parameter - update == parameter", loc="left", size=10)
    save(figure, path)
    end = {name: np.mean(got[name]["losses"][-10:]) for name in names}
    lost = {name: 100 * np.mean(got[name]["lost"]) for name in LOSING}
    return (f"steps of {case['lr']:g}: after {len(case['batches'])} of them the loss is {end['float32']:.3f} in "
            f"float32 and {end['mine']:.3f} with your masters; {end['float16']:.3f} with float16 alone, which loses "
            f"{lost['float16']:.0f} % of the updates, and {end['bfloat16']:.3f} with bfloat16 alone, which loses "
            f"{lost['bfloat16']:.0f} %")


def smooth(losses):
    return [np.mean(losses[max(0, at - 9):at + 1]) for at in range(len(losses))]
