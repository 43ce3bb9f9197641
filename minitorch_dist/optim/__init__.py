"""Optimizers, schedules, clipping and loss scaling."""

from ..torch_names import of_module
from .adafactor import Adafactor
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .clip import clip_grad_norm_
from .combined import Combined
from .dion import Dion
from .dion2 import Dion2
from .lion import Lion
from .muon import Muon
from .normuon import NorMuon
from .optimizer import Optimizer
from .polar_express import polar_express
from .scaler import GradScaler
from .schedule import SCHEDULES, LambdaLR, constant, cosine, linear, warmup_stable_decay
from .schedule_free import AdamWScheduleFree
from .sgd import SGD
from .spikes import SpikeGuard
from .trust_ratio import LAMB, LARS

__getattr__ = of_module(__name__)
__all__ = ["LAMB", "LARS", "SCHEDULES", "SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "AdamWScheduleFree", "Combined",
           "Dion", "Dion2", "GradScaler", "LambdaLR", "Lion", "Muon", "NorMuon", "Optimizer", "SpikeGuard",
           "clip_grad_norm_", "constant", "cosine", "linear", "polar_express", "warmup_stable_decay"]
