# 09.1: the first bucket is as large as the others
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for i in reversed(range(len(nbytes))):
        cap = min(first_bytes, cap_bytes) if len(buckets) == 1 else cap_bytes
        if held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
