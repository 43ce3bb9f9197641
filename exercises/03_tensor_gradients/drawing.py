"""The picture of 03.4."""

import numpy as np

from exercises.frame.pictures import canvas, save


def draw_errors(found, differences, path):
    """Per parameter: the learner's gradient, the central difference, and how far they are apart."""
    figure, axes = canvas(len(found), 3, size=(9.2, 4.8))
    worst = max(float(np.abs(grad - differences[name]).max()) for name, grad in found.items())
    for line, (name, grad) in zip(axes, found.items(), strict=True):
        largest, apart = np.abs(grad).max(), np.abs(grad - differences[name])
        for panel, shown in zip(line, (grad, differences[name], np.log10(apart + 1e-16)), strict=True):
            error = panel is line[2]
            limits = {"vmin": -16, "vmax": 0, "cmap": "magma"} if error else {
                "vmin": -largest, "vmax": largest, "cmap": "RdBu_r"}
            image = panel.imshow(shown, **limits)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.spines[:].set_visible(False)
        figure.colorbar(image, ax=line[2], ticks=[-16, -8, 0], format="1e%d")
        line[0].set_ylabel(f"{name} {grad.shape[0]} × {grad.shape[1]}")
    for panel, title in zip(axes[0], ("your gradient", "central difference", "|distance|"), strict=True):
        panel.set_title(title)
    save(figure, path)
    return (f"a network's gradients against central differences: at most {worst:.0e} apart, and that is the "
            "differences' own error")
