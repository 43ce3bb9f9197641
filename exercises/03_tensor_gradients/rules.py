"""03.3 Backward of moving, summing and picking.

Each of these operations sends every element of the input to a place in the output, or to none, or to several. Backward
goes the same ways in the other direction, and what meets is added.

Each function gets the gradient of the output, an array, and returns the gradient of the input, an array of its shape
and of the gradient's dtype. The gradient isn't changed.
"""

import numpy as np


def transpose_backward(gradient, axes):
    """Of np.transpose(x, axes): axis i of the output is axis axes[i] of the input.

    axes  tuple, a permutation; negative numbers count from the end; None: all axes reversed
    """
    raise NotImplementedError("begin with axes = (2, 0, 1): which axis of the output holds what was axis 0?")


def sum_backward(gradient, shape, axis, keepdims):
    """Of np.sum(x, axis, keepdims=keepdims) where x has this shape.

    axis  int, may be negative; tuple of such; None: all
    """
    raise NotImplementedError("begin with a sum over all axes: how much does the sum grow when one element grows? "
                              "Then put axes that were dropped back in, with extent 1, before you broadcast")


def max_backward(gradient, x, axis, keepdims):
    """Of np.max(x, axis, keepdims=keepdims). Elements that share a maximum share its gradient in equal parts.

    axis  as in sum_backward
    """
    raise NotImplementedError("begin with a mask of the x that equal their maximum; keepdims=True makes the two fit")


def getitem_backward(gradient, shape, index):
    """Of x[index] where x has this shape.

    index  whatever NumPy takes: ints, slices, integer arrays, boolean masks, and tuples of these. An element may be
           picked several times
    """
    raise NotImplementedError("begin with zeros of the shape. What does NumPy do with out[index] += gradient if a "
                              "place comes twice in the index?")


RULES = {"transpose": transpose_backward, "sum": sum_backward, "max": max_backward, "getitem": getitem_backward}
