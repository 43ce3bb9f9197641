# 09.1: first_bytes is used where the first layer is
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for i in reversed(range(len(nbytes))):
        cap = first_bytes if i == 0 else cap_bytes
        if held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
