"""17.3 Which ops become one loop.

One op after the other, each reads its operands from memory and writes its result there. A kernel is a loop over rows
which does several ops while a row is in the cache: it reads what comes from outside, and writes what others need.

All arrays here are matrices, (rows, columns), and axes are 0 or 1. An op walks over its result, a sum or max over its
operand.
"""

from math import prod

ALONE = ("matmul", "transpose", "random", "check")      # each a kernel of its own


def one_loop(kernel, nodes):
    """Whether the ops with these names, in this order, can be done in one loop over rows.

    - an op that stands alone, does
    - all walk over the same number of rows. Of columns too, but for those that walk over one column: a number per row
    - a sum or max over axis 1 is ready at the end of a row, and the row's elements may use it (softmax does). One over
      axis 0 is ready at the end of the loop: it can be in the kernel, but nothing in the kernel may use it
    """
    raise NotImplementedError("begin with {name: node}, and for each op the (rows, columns) that it walks over")


def ordered(kernels, nodes):
    """The kernels in an order in which each comes after those that it needs; None if some wait for each other.

    nodes may have ops that are in no kernel yet; no op in a kernel needs one of them.
    """
    raise NotImplementedError("begin with what is there before any kernel: the arguments. Then a kernel that needs no"
                              " more than what is there")


def fused(nodes):
    """The kernels, a list of lists of names, in an order to run them in. Each op is in just one; arguments in none.

    Greedy: an op joins a kernel in which it can be, whether or not that makes what the op needs; else it begins one.
    """
    raise NotImplementedError("begin with the ops in order. Try each kernel with the op in it: is that still one "
                              "loop, and have all kernels still an order?")


def bytes_moved(nodes, outputs, kernels):
    """Bytes that the kernels read and write. A kernel reads each array from outside once, in the array's own size, and
    writes those of its results that another kernel needs or that are outputs.

    dtypes are "float32", "float64" and "bool": 4, 8 and 1 bytes for an element.
    """
    raise NotImplementedError("begin with the bytes of each array, by name. Then per kernel two sets of names: what "
                              "it reads, what it writes")
