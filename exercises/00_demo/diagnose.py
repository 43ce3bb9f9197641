"""00.2 What broke here?

`curves.png` beside this chapter's README shows three runs on two ranks that went wrong, each over the run on one rank.
"""

MISTAKES = (
    "summed",               # the gradients are summed over the ranks, and never divided
    "stale gradients",      # nobody sets them to zero: each backward adds to the last one's
    "no broadcast",         # the ranks begin with different weights
    "mean of means",        # averaged over the ranks, though at the end of an epoch these hold unequal numbers
    "only the loss",        # the loss is averaged over the ranks, the gradients are not
    "own order",            # each rank shuffles for itself
)


def diagnose():
    """Which mistake each of the three curves shows: {"A": one of MISTAKES, "B": …, "C": …}."""
    raise NotImplementedError("begin with the lower panels: at which step does each curve leave that of one rank, and"
                              " what happens there?")
