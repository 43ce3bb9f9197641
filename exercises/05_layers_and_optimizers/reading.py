"""The digits that the chapter's last exercise learns to read, and the picture of how well."""

import functools
import math

import numpy as np

from exercises.frame.pictures import COLORS, canvas, save


def right_answers(case, outputs):
    return float(np.mean(outputs["answers"] == case_labels(case)))


def case_labels(case):
    return digits()[3][:len(case["test_images"])]


@functools.cache
def digits():
    """(train images (n, 64) float32 in 0 … 1, labels, test images, labels): those that ship, 8×8."""
    from minitorch_dist.data.digits import PATH, TRAIN
    with np.load(PATH, allow_pickle=False) as file:
        images = file["images"].reshape(len(file["images"]), 64).astype(np.float32) / 16
        labels = file["labels"].astype(np.int64)
    return images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:]


def network(rng, hidden=32, batch=64, epochs=12):
    """The case in which the learner's layers, loss and optimizers train a network."""
    images, labels, test_images, _ = digits()
    sizes = [(64, hidden), (hidden, 10)]
    parameters = [array for inputs, outputs in sizes for array in
                  ((rng.standard_normal((outputs, inputs)) * math.sqrt(2 / inputs)).astype(np.float32),
                   np.zeros(outputs, np.float32))]
    orders = [rng.permutation(len(images)) for _ in range(epochs)]
    return {"parameters": parameters, "images": images, "labels": labels, "test_images": test_images,
            "batches": [order[at:at + batch] for order in orders for at in range(0, len(order), batch)]}


def draw_curves(case, got, path):
    """The losses with both optimizers, and some digits with what the network takes them for."""
    labels, shown = case_labels(case), 12
    names = {"sgd": "SGD, momentum 0.9 (05.3)", "adam": "Adam (05.4)"}
    figure, axes = canvas(2, 1, height_ratios=(4, 1))
    for (name, label), color in zip(names.items(), COLORS, strict=False):
        share = 100 * right_answers(case, got[name])
        losses = np.array(got[name]["losses"])
        smooth = [losses[max(0, i - 9):i + 1].mean() for i in range(len(losses))]
        axes[0].plot(losses, color=color, lw=0.7, alpha=0.3)
        axes[0].plot(smooth, color=color, lw=2,
                     label=f"{label}: {share:.1f} % of {len(labels)} test images right")
    axes[0].set(xlabel="step", ylabel="cross-entropy per image", yscale="log")
    axes[0].legend(frameon=False)
    answers = got["adam"]["answers"]
    wrong = np.flatnonzero(answers != labels)
    wrong = wrong[::max(1, len(wrong) // 3)][:3]
    picked = np.sort(np.append(wrong, np.flatnonzero(answers == labels)[:shown - len(wrong)]))
    axes[1].imshow(np.hstack([np.pad(case["test_images"][i].reshape(8, 8), 1) for i in picked]), cmap="gray_r")
    for place, i in enumerate(picked):
        ok = answers[i] == labels[i]
        axes[1].text(10 * place + 4.5, 12.5, f"{answers[i]}" if ok else f"{answers[i]}, not {labels[i]}",
                     ha="center", color=COLORS[2] if ok else COLORS[1], size=9)
    axes[1].axis("off")
    axes[1].set_title("what your network takes them for", size=9)
    save(figure, path)
    sgd, adam = (100 * right_answers(case, got[name]) for name in ("sgd", "adam"))
    return (f"your layers, loss and optimizers read {sgd:.1f} % (SGD) and {adam:.1f} % (Adam) of {len(labels)} "
            "digits by writers whom they never saw")
