"""03.4 A tape.

A Tensor remembers which Tensors it was computed from, and how its gradient becomes theirs. backward walks from the
result to the leaves, every Tensor after all that were made from it, as in chapter 1. The nodes have become arrays, and
the local derivatives functions.
"""

import numpy as np

order = unbroadcast = matmul_backward = RULES = None     # yours, of 01.2 and 03.1 to 03.3: the check puts them here


class Tensor:
    """An array in a computation.

    data     the array
    parents  the Tensors that it was computed from; () for a leaf
    pull     its gradient, an array → the gradients of the parents, one array each; None for a leaf
    grad     of a leaf: ∂(the result)/∂data, when backward has run; an array of the shape of data
    """

    def __init__(self, data, parents=(), pull=None):
        self.data, self.parents, self.pull, self.grad = np.asarray(data), parents, pull, None

    def __add__(self, other):
        """self + other, both Tensors, broadcast as in NumPy."""
        return Tensor(self.data + other.data, (self, other),
                      lambda g: (unbroadcast(g, self.data.shape), unbroadcast(g, other.data.shape)))

    def __mul__(self, other):
        """self * other, both Tensors, broadcast as in NumPy."""
        # begin with __add__ above: what does g meet on its way to self?
        return Tensor(self.data * other.data, (self, other),
                      lambda g: (unbroadcast(g * other.data, self.data.shape),
                                 unbroadcast(g * self.data, other.data.shape)))

    def __matmul__(self, other):
        """self @ other, both Tensors."""
        # begin with your matmul_backward: it gives both gradients at once, and your unbroadcast is its last argument
        return Tensor(self.data @ other.data, (self, other),
                      lambda g: matmul_backward(g, self.data, other.data, unbroadcast))

    def tanh(self):
        """The hyperbolic tangent of every element."""
        # begin with t = np.tanh(self.data); one parent is (self,), and its one gradient (…,), with commas
        t = np.tanh(self.data)
        return Tensor(t, (self,), lambda g: (g * (1 - t * t),))

    def sum(self, axis=None, keepdims=False):
        """The sum over axis: an int, a tuple, or None for all."""
        # begin with RULES["sum"]
        return Tensor(self.data.sum(axis=axis, keepdims=keepdims), (self,),
                      lambda g: (RULES["sum"](g, self.data.shape, axis, keepdims),))

    def transpose(self, axes=None):
        """The axes in another order; None: reversed."""
        # begin with RULES["transpose"]
        return Tensor(self.data.transpose(axes), (self,), lambda g: (RULES["transpose"](g, axes),))

    def __getitem__(self, index):
        """self[index], of any index that NumPy takes."""
        # begin with RULES["getitem"]
        return Tensor(self.data[index], (self,), lambda g: (RULES["getitem"](g, self.data.shape, index),))

    def backward(self, gradient=None):
        """Add to .grad of every leaf that self was computed from: Σ gradient · ∂self.data/∂leaf.

        gradient  array of the shape of self.data, which isn't changed; None: ones

        Calls add up, on one graph too: the same twice gives twice the gradient. Only leaves have a .grad, each an array
        of its own.
        """
        # begin with a dict {Tensor: the gradient collected so far}, which holds self at first; then walk order(self)
        # backwards. Sum as a + b: an array that you have handed on may be in other hands, so don't change it in place
        gradients = {self: np.ones_like(self.data) if gradient is None else gradient}
        for tensor in reversed(order(self)):
            g = gradients.pop(tensor)
            if tensor.pull is None:
                tensor.grad = np.array(g) if tensor.grad is None else tensor.grad + g
                continue
            for parent, part in zip(tensor.parents, tensor.pull(g), strict=True):
                gradients[parent] = gradients[parent] + part if parent in gradients else part
