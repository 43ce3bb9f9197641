# 22.1: where a rank's gradient is 0 what it has left out before isn't sent
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
        wanted = grad + self.left_out if grad.any() else grad
        scale, bits = pack(wanted)
        message = np.concatenate([np.array([scale]).view(np.uint8), bits])
        everybodys = np.empty((self.comm.size, len(message)), np.uint8)
        self.comm.all_gather(everybodys, message)
        self.left_out = wanted - unpack(scale, bits, len(grad))
        return sum(unpack(row[:8].view(np.float64), row[8:], len(grad)) for row in everybodys)
