# 22.1: np.sign and a loop over bytes, the bits cut off afterwards
import numpy as np


def pack(v):
    signs = np.sign(v) + (v == 0)
    return float(signs @ v) / len(v), np.packbits((signs + 1).astype(np.uint8) // 2)


def unpack(scale, bits, n):
    return scale * (2.0 * np.unpackbits(bits)[:n] - 1.0)


class OneBit:
    def __init__(self, comm):
        self.comm = comm
        self.left_out = 0.0

    def sum(self, grad):
        wanted = grad + self.left_out
        scale, bits = pack(wanted)
        message = np.concatenate([np.array([scale]).view(np.uint8), bits])
        everybodys = np.empty((self.comm.size, len(message)), np.uint8)
        self.comm.all_gather(everybodys, message)
        self.left_out = wanted - unpack(scale, bits, len(grad))
        return sum(unpack(row[:8].view(np.float64), row[8:], len(grad)) for row in everybodys)
