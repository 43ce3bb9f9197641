"""Optimizers, schedules and clipping."""

from .adam import Adam, AdamW
from .clip import clip_grad_norm_
from .optimizer import Optimizer
from .schedule import LambdaLR, constant, cosine
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "LambdaLR", "Optimizer", "clip_grad_norm_", "constant", "cosine"]
