"""21.3's training run: a small network of the library's under Adam, cut over 3 ranks; and what it does in one process.
"""

import numpy as np

FEATURES, HIDDEN, CLASSES = 5, 7, 3
RANKS, LATER, BATCH, STEPS, KILL, RATE = 3, 2, 8, 8, 4, 0.05


def draw(rng):
    """The same on all ranks."""
    x = rng.normal(0, 1, (STEPS, BATCH, FEATURES))
    labels = (x @ rng.normal(0, 1, (FEATURES, CLASSES))).argmax(-1)
    shapes = [(HIDDEN, FEATURES), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,)]
    return {"what": "training", "x": x, "labels": labels, "kill": KILL, "later": LATER, "rate": RATE,
            "parameters": [0.5 * rng.standard_normal(shape) for shape in shapes]}


def of_library(case):
    """The loss of every step, in one process that nobody kills."""
    from minitorch_dist import nn, optim
    model, losses = nn.Sequential(nn.Linear(FEATURES, HIDDEN, dtype=np.float64), nn.Tanh(),
                                  nn.Linear(HIDDEN, CLASSES, dtype=np.float64)), []
    for p, array in zip(model.parameters(), case["parameters"], strict=True):
        p.data[...] = array
    optimizer = optim.Adam(model.parameters(), case["rate"])
    for x, labels in zip(case["x"], case["labels"], strict=True):
        optimizer.zero_grad()
        loss = nn.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.numpy()))
    return losses
