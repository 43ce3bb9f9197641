# 09.1: the buckets begin with the first parameter
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for i in range(len(nbytes)):
        cap = first_bytes if len(buckets) == 1 else cap_bytes
        if held >= cap and buckets[-1]:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
