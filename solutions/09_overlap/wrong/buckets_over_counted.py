# 09.1: holds beyond its cap is counted again
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for i in reversed(range(len(nbytes))):
        cap = first_bytes if len(buckets) == 1 else cap_bytes
        if held >= cap:
            buckets.append([])
            held -= cap
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
