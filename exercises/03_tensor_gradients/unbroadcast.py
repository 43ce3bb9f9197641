"""03.1 Undo the broadcasting.

Where NumPy stretches an array, one number is used many times, and the gradient of that number is the sum over its uses.
Every rule of a tensor library that allows broadcasting ends with this function.
"""


def unbroadcast(gradient, shape):
    """The gradient of an array that was broadcast.

    gradient  array of the shape that the array was broadcast to: the gradient of every copy
    shape     tuple: the shape that the array had before

    Returns an array of that shape and of gradient's dtype; gradient isn't changed.
    """
    raise NotImplementedError("begin with the axes that the array didn't have: how many, and on which side does NumPy"
                              " add them? Then the axes that it had with extent 1")
