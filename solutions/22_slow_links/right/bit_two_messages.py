# 22.1: the scales in a message of their own, and the rest in a buffer that is kept
import numpy as np


def pack(v):
    return np.abs(v).mean(), np.packbits(v >= 0)


def unpack(scale, bits, n):
    return np.where(np.unpackbits(bits, count=n), scale, -scale)


class OneBit:
    def __init__(self, comm):
        self.comm = comm
        self.left_out = 0.0

    def sum(self, grad):
        wanted = grad + self.left_out
        scale, bits = pack(wanted)
        scales, signs = np.empty((self.comm.size, 1)), np.empty((self.comm.size, len(bits)), np.uint8)
        self.comm.all_gather(scales, np.array([scale]))
        self.comm.all_gather(signs, bits)
        self.left_out = wanted - unpack(scale, bits, len(grad))
        return sum(unpack(s, row, len(grad)) for s, row in zip(scales, signs, strict=True))
