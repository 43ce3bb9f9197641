# 09.1: an empty bucket is left over at the end
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    buckets, bucket, held = [], [], 0
    for i in reversed(range(len(nbytes))):
        bucket.append(i)
        held += nbytes[i]
        if held >= (cap_bytes if buckets else first_bytes):
            buckets.append(bucket)
            bucket, held = [], 0
    return [*buckets, bucket]
