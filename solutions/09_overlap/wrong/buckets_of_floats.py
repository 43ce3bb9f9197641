# 09.1: where an integer was asked for
import numpy as np


def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for i in reversed(range(len(nbytes))):
        cap = first_bytes if len(buckets) == 1 else cap_bytes
        if held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return [np.concatenate([np.zeros(0), bucket]) for bucket in buckets]
