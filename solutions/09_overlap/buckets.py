"""09.1 Which gradients travel together?

A message costs a fixed time however short it is, so a message per parameter is too many. One message for all is too
few: it can't leave before the last gradient is there, and by then backward is over and nothing is left to hide behind.
"""


def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    """The parameters cut into buckets, in the order in which their gradients come.

    nbytes       size of each parameter, in the order in which the layers use them
    first_bytes  the first bucket is full as soon as it holds so many bytes: small, so that sending begins early
    cap_bytes    the same of every other bucket

    Returns a list of lists of parameter numbers. Backward reaches the last parameter first. A parameter is never cut;
    the one that fills a bucket still goes into it. The last bucket may stay unfilled.
    """
    # begin with the order: backward reaches the last parameter first;
    # then walk along it, and begin a new bucket whenever the last one is full
    buckets, held = [[]], 0
    for i in reversed(range(len(nbytes))):
        cap = first_bytes if len(buckets) == 1 else cap_bytes
        if held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
