"""einsum, and what is made of it, in CUDA graphs: against NumPy's einsum on the host.

The numbers are small whole ones, whose sums are exact in whatever order they are made.
"""

import numpy as np
import pytest

import minitorch_dist as mt

from . import fake_cublas
from .graph_programs import assert_equal, values
from .test_cuda_graphs import gpu, on_gpu  # noqa: F401

EINSUMS = {
    "ij,jk->ik": ((5, 3), (3, 7)), "ij,jk": ((5, 3), (3, 2)), "ij,kj->ki": ((5, 3), (7, 3)), "i,i->": ((5,), (5,)),
    "bij,bjk->bik": ((2, 5, 3), (2, 3, 7)), "ibj,kjb->bki": ((5, 2, 3), (7, 3, 2)), "i,j->ji": ((5,), (3,)),
    "ij,ij->ij": ((5, 3), (5, 3)), "bi,bj->jbi": ((2, 5), (2, 3)), "bic,bcjd->dbji": ((2, 5, 3), (2, 3, 4, 7)),
    "iij,jk->ki": ((4, 4, 3), (3, 7)), "ij,jk->i": ((5, 3), (3, 7)), "ij,kj->kj": ((1, 3), (7, 3)),
    "bij,bjk,kb->bi": ((2, 5, 3), (2, 3, 7), (7, 2)), "ij,jk,kl,lm->mi": ((5, 3), (3, 7), (7, 2), (2, 4)),
    "...ij,jk->...ki": ((2, 4, 5, 3), (3, 7)), "...ij,...jk->...ik": ((2, 1, 5, 3), (4, 3, 7)), ",ij->ji": ((), (5, 3)),
    "ij->ji": ((5, 3),), "ij->": ((5, 3),), "ij,jk->ki": ((5, 0), (0, 7)), "bij,bjk->kbi": ((0, 5, 3), (0, 3, 7)),
}
FUNCTIONS = {f"{subscripts} {shapes}": (lambda *xs, subscripts=subscripts: mt.einsum(subscripts, *xs), shapes)
             for subscripts, shapes in EINSUMS.items()}
FUNCTIONS |= {
    "tensordot": (lambda x, y: mt.tensordot(x, y, ((0, 2), (1, 0))), ((2, 3, 5), (5, 2, 4))),
    "outer": (mt.outer, ((2, 3), (5,))),
    "conv_transpose1d": (mt.conv_transpose1d, ((2, 3, 5), (3, 4, 3), (4,))),
    "conv_transpose2d": (lambda *xs: mt.conv_transpose2d(*xs, stride=(2, 3), padding=(1, 0), output_padding=(1, 2),
                                                         groups=2, dilation=(1, 2)),
                         ((2, 4, 3, 2), (4, 3, 3, 2), (6,))),
    "conv1d, differentiated": (lambda x, w: mt.grad(lambda v: (mt.conv1d(v, w, stride=2) ** 2).sum())(x),
                               ((2, 2, 7), (3, 2, 3))),
}


def whole(shape, seed, dtype="f4"):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def passes(function):
    """A function of a cotangent and inputs: what `function` gives, and its pullback of the cotangent."""
    def both(ct, *xs):
        leaves = [x.detach().requires_grad_() for x in xs]
        y = function(*leaves)
        y.backward(ct)
        return [y.detach(), *(leaf.grad for leaf in leaves)]
    return both


def check(name, dtype="f4"):
    """On a GPU, recorded and repeated, as on the host without a graph."""
    function, shapes = FUNCTIONS[name]
    graphed = mt.cuda_graph(passes(function))
    for call in range(4):
        xs = [whole(shape, 10 * call + k, dtype) for k, shape in enumerate(shapes)]
        given = [whole(function(*xs).shape, call + 7, dtype), *xs]
        assert_equal(values(graphed(*map(on_gpu, given))), values(passes(function)(*map(mt.tensor, given))))
    assert graphed.graphs == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_einsum_and_what_is_made_of_it_are_recorded(name):
    check(name)


@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_other_dtypes_are_recorded(dtype):
    check("conv_transpose2d", dtype)


@pytest.mark.parametrize("shapes, sizes", [
    (((2, 50), (50, 60), (60, 1)), [(50, 60, 1), (2, 50, 1)]),
    (((1, 60), (60, 50), (50, 2)), [(1, 60, 50), (2, 50, 1)])], ids=["right", "left"])
def test_the_pair_that_leaves_less_behind_is_multiplied_first(shapes, sizes):
    """cuBLAS is asked for transposes: columns, rows, what is summed."""
    mt.cuda_graph(lambda *xs: mt.einsum("ij,jk,kl->il", *xs))(*(on_gpu(whole(s, 0)) for s in shapes))
    assert [(m, k, n) for _, (n, m, k), _ in fake_cublas.calls] == sizes


def test_where_nothing_is_summed_cublas_is_not_asked():
    """For as many products of 1 × 1 matrices as there are elements."""
    mt.cuda_graph(lambda x, y: mt.einsum("ij,ij->ij", x, y))(*(on_gpu(whole((5, 3), seed)) for seed in (0, 1)))
    assert not fake_cublas.calls
