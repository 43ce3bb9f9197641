# 22.2: Gram-Schmidt, twice, with zeros where nothing is left
import numpy as np


def numbers(shape, rank):
    whole = int(np.prod(shape))
    return min(whole, rank * (shape[0] + whole // shape[0])) if len(shape) > 1 else whole


def orthonormal(p):
    columns = []
    for column in p.T:
        before = np.linalg.norm(column)
        for _ in range(2):
            for other in columns:
                column = column - (other @ column) * other
        length = np.linalg.norm(column)
        columns.append(column / length if length > 1e-9 * before else np.zeros_like(column))
    return np.stack(columns, 1)


class PowerSGD:
    def __init__(self, comm, q):
        self.comm, self.q = comm, q
        self.left_out = 0.0

    def sum(self, grad):
        matrix = grad + self.left_out
        p = matrix @ self.q
        self.comm.all_reduce(p)
        p = orthonormal(p)
        q = matrix.T @ p
        self.left_out = matrix - p @ q.T
        self.comm.all_reduce(q)
        self.q = q
        return p @ q.T
