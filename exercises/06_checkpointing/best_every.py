"""06.3 How many checkpoints?

Few checkpoints make long segments, short segments many checkpoints. In between lies the least memory.
"""

def peak(n, every):
    """The most inputs alive at once in backward, an int, in a network of n layers with a checkpoint every `every`
    layers; n is 1 to 2,450, every 1 to n.

    While a segment is gone through, there are its own inputs, the first of which is its checkpoint, and the checkpoints
    of the segments before it; those after it have been let go of. The last segment may be shorter than the others.
    """
    raise NotImplementedError("begin with n = 10 and every = 4, on paper: segments 0 to 3, 4 to 7, 8 to 9. What is "
                              "alive in the last, when both its inputs are there? What in the one before, when all "
                              "four are?")


def best_every(n):
    """(every, peak): the segment length from 1 to n with the lowest peak; the longest of them if several have it, for
    then the fewest checkpoints outlive the forward pass."""
    raise NotImplementedError("begin with the peak of every length there is")
