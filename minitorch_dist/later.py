"""Names that a package has, and whose modules are imported by the first who asks: so that whoever wants one module of
a package, say a table that takes nothing to load, doesn't pay for all of them.

    __getattr__, __all__ = of_modules(__name__, {"pipeline": ["Pipeline", "cut_sequential"], "two_buffered": […]})
"""

from importlib import import_module


def of_modules(package, names):
    """(__getattr__, __all__) for `package`, whose modules have the `names`, {module: names}."""
    home = {name: module for module, listed in names.items() for name in listed}

    def __getattr__(name):
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. It has: {', '.join(sorted(home))}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return __getattr__, sorted(home)
