"""NumPy's own Philox stream, bit for bit: from its start, from the middle of a block, through several programs."""

from minitorch_dist.kernels import dropout as module

from ..harness import SIZES, Sample, random

KEYS = (0x0123456789ABCDEFFEDCBA9876543210, 0, (1 << 128) - 1, 1 << 63, 7)


def uniform(n, offset=0, key=KEYS[0]):
    def entry(like):
        return module.philox_uniform(key, offset, n, like)
    return Sample("philox_uniform", n, entry, lambda like: module.uniform_definition(key, offset, n), (random(1),),
                  f"from {offset} of {key:x}", tolerance=0.0)


def dropout(*shape, dtype="float32", offset=0, p=0.1, n=None):
    def entry(x):
        return module.dropout(x, p, KEYS[0], offset)
    return Sample("dropout", n or shape[-1], entry, lambda x: module.definition(x, p, KEYS[0], offset),
                  (random(*shape, dtype=dtype),), f"{shape} {dtype} p={p} from {offset}")


SAMPLES = [
    *(uniform(n) for n in SIZES), *(uniform(1025, key=key) for key in KEYS[1:]),
    *(uniform(31, offset=offset) for offset in range(1, 9)),
    uniform(2049, offset=1027), uniform(9, offset=8 * (2 ** 16) + 3), *(dropout(n) for n in SIZES),
    dropout(3, 5, 7, p=0.5), dropout(1025, offset=5, p=0.9), dropout(2049, p=0.0), dropout(257, dtype="float16", p=0.3),
    dropout(257, dtype="bfloat16", p=0.5),
    # Multiples of 16: 128 bits at a time.
    uniform(2048), uniform(2064, offset=1040), dropout(3, 1024, n=3072), dropout(2064, dtype="float16", p=0.3),
    dropout(2048, dtype="bfloat16", offset=1040),
]
