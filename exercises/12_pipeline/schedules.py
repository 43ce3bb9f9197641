"""12.1 Who works when, on what?

The layers are cut into stages, one per rank, and the batch into micro-batches, which follow each other through the
stages. A schedule is plain data: for each stage the list of what it does, in order. No message is sent yet.
"""


def gpipe(stages, micro_batches):
    """All forwards, then all backwards.

    Returns a list with a list per stage, of pairs: ("F", k) is the forward pass of micro-batch k through this stage,
    ("B", k) its backward pass. Micro-batches are 0, 1, … micro_batches - 1.
    """
    raise NotImplementedError("begin with stage 0: which pairs, in which order? Does another stage do anything else?")


def one_forward_one_backward(stages, micro_batches):
    """1F1B: a stage goes back as soon as it can, so that it can forget what it keeps. Pairs as in gpipe.

    Stage s (the last is stages - 1) holds the activations of at most min(micro_batches, stages - s) micro-batches at a
    time, and the batch takes no longer than with gpipe.
    """
    raise NotImplementedError("begin with the last stage, which can go back at once: F0 B0 F1 B1 …; how many forwards"
                              " does the stage before it do until its first gradient comes back?")
