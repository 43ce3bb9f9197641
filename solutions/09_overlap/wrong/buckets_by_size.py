# 09.1: the parameters are sorted by their size
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for i in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):
        cap = first_bytes if len(buckets) == 1 else cap_bytes
        if held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
