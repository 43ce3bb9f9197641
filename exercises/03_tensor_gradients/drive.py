"""How the answers of this chapter are called: shapes, axes and indices come as text; what NumPy refuses is reported."""

import ast
import collections

import numpy as np


def attempt(function, names, run):
    """{name: array} of what a call gives; where NumPy refuses the shapes, in place of each a string that says where."""
    try:
        out = function()
    except (ValueError, IndexError) as error:
        step, line = error.__traceback__, None
        while step is not None:
            if step.tb_frame.f_code.co_filename == run.module.__file__:
                line = step.tb_lineno
            step = step.tb_next
        return dict.fromkeys(names, f"{type(error).__name__} at your line {line}: {error}")
    if len(names) == 1:
        out = (out,)
    if not isinstance(out, (tuple, list)) or len(out) != len(names):
        kind = f"a {type(out).__name__}" + f" of {len(out)}" * isinstance(out, (tuple, list))
        raise TypeError(f"the answer returns {len(names)} arrays, {' and '.join(names)}: yours is {kind}")
    return dict(zip(names, out, strict=True))


def unbroadcast(learner, inputs, run):
    """`shape` as a tuple."""
    gradient = inputs["gradient"]
    return attempt(lambda: learner(gradient, ast.literal_eval(inputs["shape"])), ["result"], run) | {
        "gradient": gradient}


def matmul_backward(learner, inputs, run):
    """Both gradients, under names of their own."""
    gradient, x, y = inputs["gradient"], inputs["x"], inputs["y"]
    names = ["the gradient of x", "the gradient of y"]
    return attempt(lambda: learner(gradient, x, y, run.earlier["unbroadcast"]), names, run) | {
        "gradient": gradient, "x": x, "y": y}


def RULES(learner, inputs, run):
    """The rule that the case names."""
    rule, gradient, x = learner[inputs["rule"]], inputs["gradient"], inputs["x"]
    text = {name: eval(inputs[name], {"np": np}) for name in ("axes", "axis", "keepdims", "index") if name in inputs}
    arguments = {"transpose": lambda: (gradient, text["axes"]),
                 "sum": lambda: (gradient, x.shape, text["axis"], text["keepdims"]),
                 "max": lambda: (gradient, x, text["axis"], text["keepdims"]),
                 "getitem": lambda: (gradient, x.shape, text["index"])}[inputs["rule"]]()
    return attempt(lambda: rule(*arguments), ["result"], run) | {"gradient": gradient, "x": x}


def long_chain(x, y):
    for _ in range(3000):
        x = x + y
    return x


def counted_pulls(tensors):
    """A Counter {Tensor: how often its pull was called}; from now on."""
    pulls = collections.Counter()

    def counted(tensor, pull):
        def count(g):
            pulls[tensor] += 1
            return pull(g)
        return count
    for tensor in tensors:
        if tensor.pull is not None:
            tensor.pull = counted(tensor, tensor.pull)
    return pulls


def check_parents(root):
    """TypeError where a Tensor's parents are no tuple: who walks them takes the elements of a Tensor for parents."""
    seen, stack = {root}, [root]
    while stack:
        tensor = stack.pop()
        if not isinstance(tensor.parents, (tuple, list)):
            kind = type(tensor.parents).__name__
            raise TypeError(f"the parents of a Tensor are a {kind}, not a tuple: of one it is (self,), with the comma")
        new = [parent for parent in tensor.parents if parent not in seen]
        seen.update(new)
        stack += new


def Tensor(learner, inputs, run):
    """A program on Tensors, and backward twice: the second time with another gradient."""
    undo = run.earlier["unbroadcast"]
    vars(run.module).update(run.earlier)
    run.module.unbroadcast = lambda g, shape: g if g.shape == shape else undo(g, shape)     # it may hand g itself on
    leaves = {name: learner(array) for name, array in inputs["leaves"].items()}
    names = {"tanh": lambda x: x.tanh(), "total": lambda x, *how: x.sum(*how), "np": np,
             "turn": lambda x, *axes: x.transpose(*axes), "long": long_chain}
    gradient = None if inputs["gradient"] is None else inputs["gradient"].copy()
    second = inputs["second"].copy()
    out = eval(inputs["program"], names | leaves)
    check_parents(out)
    found = {"value": out.data, "shared": False, "by ways": False}
    pulls = counted_pulls(run.earlier["order"](out))
    for name, handed in (("once", gradient), ("twice", second)):
        pulls.clear()
        out.backward(handed)
        found["by ways"] |= any(count > len(tensor.parents) for tensor, count in pulls.items())    # one each is fine
        grads = {leaf: tensor.grad for leaf, tensor in leaves.items()}
        found[name] = {leaf: np.array(grad) if isinstance(grad, (np.ndarray, np.generic)) else grad
                       for leaf, grad in grads.items()}
        arrays = [gradient, second, *grads.values(), *(tensor.data for tensor in leaves.values())]
        arrays = [array for array in arrays if isinstance(array, np.ndarray)]
        found["shared"] |= any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    found["kept"] = any(tensor.grad is not None for tensor in run.earlier["order"](out) if tensor.parents)
    return found | {"gradient": gradient, "second": second,
                    "leaves": {name: tensor.data for name, tensor in leaves.items()}}
