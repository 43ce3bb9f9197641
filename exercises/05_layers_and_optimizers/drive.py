"""How the answers of this chapter are called."""

import numpy as np


def Linear(learner, inputs, run):
    """An earlier pass with other numbers, an update of the parameters in place, then the pass that is looked at, in the
    midst of which another layer goes forward. And one in float32, for the dtypes.
    """
    weight, bias = inputs["weight"].copy(), inputs["bias"].copy()
    layer = learner(weight, bias)
    earlier_x, earlier_dy = inputs["earlier_x"].copy(), inputs["earlier_dy"].copy()
    earlier = [layer.forward(earlier_x), *layer.backward(earlier_dy)]
    before = [np.array(array) for array in earlier]
    weight += inputs["update"]
    bias += inputs["bias_update"]
    y = layer.forward(inputs["x"])
    learner(weight.copy(), bias.copy()).forward(inputs["x"] + 1)
    by_x, by_weight, by_bias = layer.backward(inputs["dy"])
    x, dy, *parameters = (inputs[name].astype(np.float32) for name in ("x", "dy", "weight", "bias"))
    single = learner(*parameters)
    single = [single.forward(x), *single.backward(dy)]
    earlier_x[...] = earlier_dy[...] = np.nan       # the caller's: what was returned earlier must not lie in there
    return {"y": y, "by_x": by_x, "by_weight": by_weight, "by_bias": by_bias,
            "dtypes": [str(getattr(array, "dtype", type(array).__name__)) for array in single],
            "kept": all(np.array_equal(a, b) for a, b in zip(earlier, before, strict=True)),
            "weight_after": weight, "bias_after": bias, "x": inputs["x"], "dy": inputs["dy"]}


def softmax_cross_entropy(learner, inputs, run):
    """In float64, and once more in float32 for the dtypes."""
    try:
        loss, gradient = learner(inputs["logits"], inputs["labels"])
    except ValueError as error:
        if "zero-size array to reduction" not in str(error):
            raise
        raise ValueError(f"{error}. There are no rows here, so that is a maximum over rows: each row needs the largest "
                         "of its own logits, along axis 1").with_traceback(error.__traceback__) from None
    single = learner(inputs["logits"].astype(np.float32), inputs["labels"].copy())
    return {"loss": loss, "gradient": gradient, **inputs,
            "dtypes": [str(getattr(value, "dtype", type(value).__name__)) for value in single]}


def SGD(learner, inputs, run):
    return steps(learner, inputs)


def Adam(learner, inputs, run):
    return train_both(learner, inputs, run) if "images" in inputs else steps(learner, inputs)


def steps(learner, inputs):
    """parameters[i][step]: parameter i after each step. grads[step][i]: what is left of the gradients.

    A second optimizer of the same class, with numbers of its own, takes its steps in between; and the gradients always
    come in the same arrays. The parameters lie in memory by columns: whoever steps along p.ravel() moves a copy.
    And a step in float32, for the dtypes of what is remembered. Where the case says "defaults", the settings are those
    of the class.
    """
    settings = {} if inputs.get("defaults") else inputs["settings"]
    parameters = [p.copy(order="F") for p in inputs["parameters"]]
    others = [p.copy(order="F") for p in inputs["parameters"]]
    optimizer, other = learner(list(parameters), **settings), learner(list(others), **settings)
    buffers = [np.empty_like(g) for g in inputs["grads"][0]]
    path, after = [], []
    for grads, lr in zip(inputs["grads"], inputs["lrs"], strict=True):
        for buffer, g in zip(buffers, grads, strict=True):
            buffer[...] = g
        optimizer.step(buffers) if lr is None else optimizer.step(buffers, lr=lr)
        path.append([p.copy() for p in parameters])
        after.append([buffer.copy() for buffer in buffers])
        other.step([np.array(1.0 - g) for g in grads])
    singles = [p.astype(np.float32) for p in inputs["parameters"]]
    single = learner(singles, **settings)
    single.step([g.astype(np.float32) for g in inputs["grads"][0]])
    smallest = min(p.size for p in singles if p.ndim)
    kept = {str(array.dtype) for array in arrays(getattr(single, "__dict__", {})) if array.size >= smallest}
    return {"parameters": [np.stack(values) for values in zip(*path, strict=True)], "grads": after,
            "kept": sorted(kept)}


def arrays(value):
    """All arrays in a value of lists and dicts."""
    if isinstance(value, np.ndarray):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [array for part in parts for array in arrays(part)]


# ---------------------------------------------------------------- the training at the end of the chapter

def train_both(learner, inputs, run):
    """The same network trained by SGD and by Adam, out of the learner's pieces."""
    pieces = run.earlier["Linear"], run.earlier["softmax_cross_entropy"]
    return {"sgd": train(*pieces, lambda p: run.earlier["SGD"](p, 0.1, momentum=0.9), **inputs),
            "adam": train(*pieces, lambda p: learner(p, lr=5e-3), **inputs)}


def train(linear, loss, optimizer, parameters, images, labels, test_images, batches):
    """Linear, ReLU, Linear: the losses of the steps, and what it takes the test images for in the end."""
    parameters = [p.copy() for p in parameters]
    first, second = linear(*parameters[:2]), linear(*parameters[2:])
    optimizer, losses = optimizer(parameters), []
    for rows in batches:
        hidden = first.forward(images[rows])
        value, dy = loss(second.forward(np.maximum(hidden, 0)), labels[rows])
        dh, *grads = second.backward(dy / np.float32(len(rows)))
        _, *first_grads = first.backward(dh * (hidden > 0))
        optimizer.step([*first_grads, *grads])
        losses.append(float(value) / len(rows))
    scores = second.forward(np.maximum(first.forward(test_images), 0))
    return {"losses": losses, "answers": scores.argmax(axis=1)}
