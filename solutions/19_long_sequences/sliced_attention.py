"""19.6 Sequences that go through a pipeline in slices.

A stage of a pipeline (chapter 12) begins when the first sequences have gone through all stages before it. In causal
attention nobody looks ahead, so that the first positions can go on while the others are still worked on: a slice of a
sequence leaves its keys and values behind, for the queries of later slices.

                      k₀     k₁   k₂
    slice 0     q₀    ◣                         forward makes the rows from above, and leaves keys and values
    slice 1     q₁    ■ ■ ■  ◣
    slice 2     q₂    ■ ■ ■  ■ ■  ◣             backward goes through them from below

What is said of k₀ is the sum of its column, the queries of slice 2 first, then 1, then 0: it is complete when the
backward of slice 0 comes, and nobody needs k₀ then. Slices may have any lengths. Of several micro-batches some slices
are under way at a time, as in 1F1B:

    F0.0 F0.1 F0.2 F1.0 F1.1 B0.2 F1.2 B0.1 F2.0 B0.0 F2.1 B1.2 …         forward or backward, micro-batch . slice
"""

import numpy as np


class SlicedAttention:
    """Causal attention, a layer of a pipeline's stage, to which sequences come slice by slice.

    Arrays are float64. Those that are given stay as they are; the caller leaves q, k and v alone until the slice's
    backward is over. dout, and all that the caller gets, is the caller's at once, who may write into it: so no array
    that backward needs is returned, and no view of an array that is larger, which would live as long.
    """

    def __init__(self):
        # begin with places for micro-batches: none is under way yet. What will their slices leave there?
        self.places = {}

    def forward(self, micro_batch, q, k, v):
        """Attention of a micro-batch's next slice: out [heads, time, width].

        micro_batch  its number, any integer. When all its slices have had their backward, it may come again, with other
                     sequences
        q, k, v      [heads, time, features] twice, [heads, time, width]: of the slice's positions, one or more, which
                     stand behind those of the micro-batch's slices so far

        A position sees the keys up to its own, those of earlier slices included: softmax(q kᵀ / √features) v.
        """
        # begin with the keys and values of all slices so far, and of this one. At which of these positions do its
        # queries stand? What will backward need of this slice, and what of all?
        slices, keys, values = self.places.get(micro_batch, ([], k[:, :0], v[:, :0]))
        keys, values = np.concatenate([keys, k], 1), np.concatenate([values, v], 1)
        at = np.arange(keys.shape[1])
        scores = q @ keys.transpose(0, 2, 1) / q.shape[2] ** 0.5
        scores = np.where(at <= at[-q.shape[1]:, None], scores, -np.inf)
        p = np.exp(scores - scores.max(2, keepdims=True))
        p = p / p.sum(2, keepdims=True)
        self.places[micro_batch] = [*slices, (q, p)], keys, values
        return p @ values

    def backward(self, micro_batch, dout):
        """The gradients of the last one of a micro-batch's slices that hasn't had its backward: (dq, dk, dv).

        dout  [heads, time, width]: the gradient by the slice's out

        All forwards of a micro-batch come before its backwards; those of others may come in between. dk and dv are
        complete: the sums of what the queries of this slice and of all later ones say. No scores are made with later
        keys. Afterwards nothing is kept of the slice's queries and weights, and behind a micro-batch's last backward
        nothing of it at all.
        """
        # begin with what this slice's queries say of all keys and values up to its own: which of that is to be given
        # back now, together with what later slices have said, and which is to be kept for earlier ones?
        slices, keys, values, *said = self.places.pop(micro_batch)
        q, p = slices.pop()
        by_p = dout @ values.transpose(0, 2, 1)
        by_scores = p * (by_p - (p * by_p).sum(2, keepdims=True)) / q.shape[2] ** 0.5
        dkeys, dvalues = by_scores.transpose(0, 2, 1) @ q, p.transpose(0, 2, 1) @ dout
        for found, more in zip((dkeys, dvalues), said, strict=False):
            found += more
        first = keys.shape[1] - q.shape[1]
        if slices:
            self.places[micro_batch] = slices, *(x[:, :first].copy() for x in (keys, values, dkeys, dvalues))
        return by_scores @ keys, dkeys[:, first:].copy(), dvalues[:, first:].copy()
