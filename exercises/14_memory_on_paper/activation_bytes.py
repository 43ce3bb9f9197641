"""14.3 What forward leaves behind for backward.

In a transformer's layer everything has sequence · batch · hidden elements or a small multiple of that, except what
attention computes for every pair of positions, in every head.
"""


def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    """Bytes of activations of a GPT-like transformer at the beginning of backward's way through a layer, at the most.

    sequence, batch, hidden, heads, layers   numbers: positions, samples, features, heads per layer, layers
    recompute   "none"       every layer keeps all: what the table in README.md has, for each layer
                "selective"  layers keep all but what belongs to pairs of positions (the table's lower part)
                "full"       layers keep their input only: sequence · batch · hidden elements of 16 bits

    What a layer hasn't kept is computed again when backward comes to it, and let go of after: it is there for one layer
    at a time, in addition to what all layers keep.
    """
    raise NotImplementedError("begin with the two parts of one layer that keeps everything: bytes per position and "
                              "feature, and bytes per pair of positions and head")
