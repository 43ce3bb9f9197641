"""Parameter servers, and the remote calls that they are made of: rpc.py first, then parameter_server.py."""

from ...later import of_modules

__getattr__, __all__ = of_modules(__name__, {
    "parameter_server": ["ParameterServer"],
    "rpc": ["Rpc"],
})
