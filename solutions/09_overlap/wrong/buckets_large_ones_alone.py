# 09.1: closed before they would grow beyond
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for i in reversed(range(len(nbytes))):
        if nbytes[i] >= 4 * cap_bytes and buckets[-1]:
            buckets.append([])
            held = 0
        cap = first_bytes if len(buckets) == 1 else cap_bytes
        if held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
