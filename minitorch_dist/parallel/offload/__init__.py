"""What needn't lie on the device: activations and optimizer state on the host, parameters on disk."""

from ...later import of_modules

__getattr__, __all__ = of_modules(__name__, {
    "offload": ["offload_activations", "offload_optimizer"],
    "streaming": ["stream_from_disk"],
})
