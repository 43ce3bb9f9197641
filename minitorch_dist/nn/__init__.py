"""Layers, losses and initial values."""

from . import init
from .layers import GELU, Dropout, Flatten, LeakyReLU, Linear, ReLU, Sigmoid, Tanh
from .loss import cross_entropy, mse_loss
from .module import Module, Parameter, Sequential

__all__ = ["GELU", "Dropout", "Flatten", "LeakyReLU", "Linear", "Module", "Parameter", "ReLU", "Sequential", "Sigmoid",
           "Tanh", "cross_entropy", "init", "mse_loss"]
