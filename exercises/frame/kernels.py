"""What checks of GPU kernels ask for: no harm to memory, and all of the work done by kernels. Answers run in Triton's
interpreter, with a meter (minitorch_dist/kernels/metered.py), whose facts are among the outputs.
"""

import numpy as np

from .check import demand

NO_HARM = {"elements read outside of the arrays": 0, "elements written outside of the arrays": 0,
           "elements written by two programs": 0}


def harm(got, word):
    """How many elements were read or written outside of the arrays, or written twice: word is "read", …"""
    return sum(count for name, count in got["memory"].items() if word in name)


def is_out(name, f, rtol=1e-5, atol=1e-6):
    """A predicate: the output `name` is f(case), element by element, nan where f(case) is nan."""
    def predicate(case, got):
        theirs = f(case)
        return theirs is not None and np.allclose(got[name], theirs, rtol=rtol, atol=atol, equal_nan=True)
    return predicate


def both(*predicates):
    return lambda case, got: all(predicate(case, got) for predicate in predicates)


LAUNCHED = demand("right, but no kernel was launched that writes anything: NumPy has done the work",
                  lambda case, got: got["launches"] > 0 and got["bytes_written"] > 0)


def not_by_kernels(got):
    """What of the arrays no kernel has touched, in words."""
    both = (("written", got["unwritten"]), ("read", got["unread"]))
    return ", ".join(f"{count} elements of {name} are {word} by no kernel" for word, arrays in both
                     for name, count in arrays.items() if count)


# Asked last: what is done beside the kernel may be right and fast enough, here.
BY_KERNELS = [
    demand(lambda case, got: f"right, but {not_by_kernels(got)}: NumPy has done them, or has made a copy. That is one "
                             "more way through memory", lambda case, got: not not_by_kernels(got)),
    demand(lambda case, got: f"right, but NumPy computes with the arrays too, beside the kernel: {got['numpy'][0]}. On "
                             "a GPU each operation is a launch of its own, and a way through memory",
           lambda case, got: not got["numpy"]),
]
