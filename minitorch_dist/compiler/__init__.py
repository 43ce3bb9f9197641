"""The graph compiler: capture, passes, fusion, kernels. See compiled.py, from which one reads on."""

from .compiled import Compiled, compile

__all__ = ["Compiled", "compile"]
