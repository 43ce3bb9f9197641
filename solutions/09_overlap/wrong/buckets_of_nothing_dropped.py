# 09.1: the last bucket is missing
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for i in reversed(range(len(nbytes))):
        cap = first_bytes if len(buckets) == 1 else cap_bytes
        if held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return [bucket for bucket in buckets if sum(nbytes[i] for i in bucket)]
