# 09.1: by recursion, as tuples
def cut_into_buckets(nbytes, first_bytes, cap_bytes):
    if not nbytes:
        return []
    held, start = 0, len(nbytes)
    while start and held < first_bytes:
        start -= 1
        held += nbytes[start]
    bucket = range(len(nbytes) - 1, start - 1, -1)
    return [tuple(bucket), *cut_into_buckets(nbytes[:start], cap_bytes, cap_bytes)]
