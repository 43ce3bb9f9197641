# 09.1: a bucket that holds 0 bytes is taken for none
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [], 0
    for i in reversed(range(len(nbytes))):
        cap = first_bytes if len(buckets) <= 1 else cap_bytes
        if held == 0 or held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
