"""What graphs are made of: the seam between what runs now and what is recorded to run again."""

import threading


class Recording(threading.local):
    """What this thread's operations become a part of."""

    graph = None    # or a Recorder (cuda_graphs.py), or a Capture (compiler/capture.py)


recording = Recording()


def refuse_in_graph(what):
    """Raise in a function that a graph repeats: `what` would be done once only."""
    if recording.graph is not None:
        raise recording.graph.refusal(what)


def assign(array, values):
    """array[...] = values, of what a function keeps (running statistics); in a compiled one at the end of each call."""
    if recording.graph is not None:
        recording.graph.assign(array, values)
    else:
        array[...] = values
