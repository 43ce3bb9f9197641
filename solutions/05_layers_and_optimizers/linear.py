"""05.1 A linear layer, forwards and backwards.

Backward gets a cotangent dy, the derivative of the loss by every element of y, and passes on the same for x; on the
way it finds what the optimizer needs, for weight and bias.
"""


class Linear:
    """y = x · weightᵀ + bias, on the last axis of x.

    weight  array (outputs, inputs)
    bias    array (outputs,)

    All arrays that go in are of one dtype, float32 or float64, and so are those that come out.

    The layer keeps the arrays themselves: an optimizer writes into them, and the next forward sees it.
    """

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        """x (…, inputs) -> y (…, outputs), with any number of axes before the last, also none."""
        # begin with y, and keep what backward will need
        self.x = x
        return x @ self.weight.T + self.bias

    def backward(self, dy):
        """The gradients of Σ dy·y by x, weight and bias: a tuple of arrays, of the shapes of these three.

        dy  (…, outputs), the cotangent of the y of the last forward

        Every call is for itself: it returns new arrays, and nothing is added to earlier gradients.
        """
        # begin with the shapes: each gradient has that of its array, and only one way of multiplying and summing gets
        # there
        rows, cotangents = self.x.reshape(-1, self.x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        return dy @ self.weight, cotangents.T @ rows, cotangents.sum(axis=0)
