"""Python imports this before anything else: emulated GPUs for the programs that __main__.py starts."""

from tests.device.emulated.hooks import install

install()
