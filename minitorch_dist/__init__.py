"""minitorch_dist: how deep learning is trained at scale, small enough to read.

    import minitorch_dist as mt
    x = mt.tensor([1.0, 2.0], requires_grad=True)
    (x * x).sum().backward()
    x.grad                          # tensor([2., 4.])
"""

from importlib import import_module

from . import launch_env

launch_env.default_blas_threads()      # before NumPy is loaded: its BLAS reads the setting once

with launch_env.no_traceback_of_ctrl_c():
    from . import backend, checkpoints, comm, data, kernels, ledger, nn, optim, parallel, viz
    from .autodiff import *  # noqa: F403
    from .autodiff import __all__ as _autodiff
    from .autodiff.lists import taking_lists as _taking_lists
    from .autodiff.ops import *  # noqa: F403
    from .autodiff.ops import __all__ as _ops
    from .autodiff.ops import random  # noqa: F401
    from .backend import manual_seed
    from .compiler import compile
    from .cuda_graphs import cuda_graph
    from .timeline import trace
    from .torch_names import of_module

globals().update({name: _taking_lists(globals()[name], __name__) for name in (*_ops, "ones_like", "zeros_like")})
_elsewhere = of_module(__name__)
LATER = ("compress", "plan", "supervise", "training")


def __getattr__(name):
    """bfloat16 as np.float32 is float32; ml_dtypes, and LATER, are imported by the first who asks."""
    if name == "bfloat16":
        return backend.load_bfloat16()
    if name in LATER:
        with launch_env.no_traceback_of_ctrl_c():
            return import_module(f"{__name__}.{name}")
    return _elsewhere(name)


def __dir__():
    return [*globals(), "bfloat16", *LATER]


__version__ = "0.1.0"
__all__ = [*_autodiff, *_ops, "backend", "checkpoints", "comm", "compile", "cuda_graph", "data", "kernels", "ledger",
           "manual_seed", "nn", "optim", "parallel", "random", "trace", "viz"]
