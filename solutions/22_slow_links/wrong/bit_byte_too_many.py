# 22.1: on 3 ranks out must have 3 × 10 = 30
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
        message = np.concatenate([np.array([scale]).view(np.uint8), bits])
        everybodys = np.empty((self.comm.size, 8 + len(grad) // 8 + 1), np.uint8)
        self.comm.all_gather(everybodys, message)
        self.left_out = wanted - unpack(scale, bits, len(grad))
        return sum(unpack(row[:8].view(np.float64), row[8:], len(grad)) for row in everybodys)
