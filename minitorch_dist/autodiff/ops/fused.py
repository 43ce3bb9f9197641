"""Fused ops: a definition in ordinary ops, a kernel, and one pullback that makes all cotangents at once.

The kernel and the pullback run on raw arrays only. In forward mode, and when
backward is itself differentiated, the definition speaks, so a fused op is a
matter of speed alone; tests hold the two against each other in every mode.
"""

from ...backend import module_of, xp
from ..primitive import Primitive, bind, lower
from .elementwise import exp
from .indexing import getitem
from .reduction import logsumexp, sum

# ---------------------------------------------------------------- softmax cross-entropy


def _picked(logits, labels):
    return getitem(logits, (module_of(labels).arange(len(labels)), labels))


def _xent_definition(logits, labels):
    return logsumexp(logits, axis=1) - _picked(logits, labels)


def _xent_forward(logits, labels):
    rows = module_of(logits).arange(len(labels))
    z = logits - logits.max(axis=1, keepdims=True)      # so that exp can't overflow
    right = z[rows, labels]
    xp.exp(z, out=z)
    total = z.sum(axis=1, keepdims=True)
    z /= total
    return xp.log(total[:, 0]) - right, z               # the losses, and softmax(logits) for backward


def _xent_pullback(ct, wanted, labels, aux):
    g = aux * ct[:, None]
    g[module_of(g).arange(len(labels)), labels] -= ct
    return (g,)


_xent = Primitive("softmax_cross_entropy", _xent_forward, "logits", "labels", aux=True,
                  definition=_xent_definition, pullback=_xent_pullback)


def softmax_cross_entropy(logits, labels):
    """-log softmax(logits)[label] per sample: logits (n, classes) float, labels (n,) integers -> (n,).

    Stable for any finite logits. d/dlogits = softmax(logits) - one_hot(label).
    Raises ValueError on shapes that don't fit and on labels outside of 0 … classes-1.
    """
    labels = lower(labels)
    if len(logits.shape) != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"softmax_cross_entropy: logits {logits.shape} and labels {labels.shape}: "
                         "they must be (n, classes) and (n,)")
    if labels.dtype.kind not in "iu":
        raise TypeError(f"softmax_cross_entropy: labels of dtype {labels.dtype}: class numbers must be integers")
    if labels.size and not (0 <= labels.min() and labels.max() < logits.shape[1]):
        raise ValueError(f"softmax_cross_entropy: labels from {labels.min()} to {labels.max()}, but there are "
                         f"{logits.shape[1]} classes: 0 to {logits.shape[1] - 1}")
    return bind(_xent, (logits,), (labels,))


# ---------------------------------------------------------------- composed

def log_softmax(x, axis=-1):
    """log of softmax(x) along `axis`, without overflow."""
    return x - logsumexp(x, axis, keepdims=True)


def softmax(x, axis=-1):
    """exp(x) / Σ exp(x) along `axis`, without overflow."""
    e = exp(x - lower(x).max(axis=axis, keepdims=True))
    return e / sum(e, axis, keepdims=True)
