"""Smaller models: numbers of few bits, fewer weights, students of a large one, averages of several."""

from . import prune, shrink, sparse
from .distill import distillation_loss
from .lottery import lottery_ticket
from .low_precision import LowPrecisionLinear, convert_to_low_precision_training
from .quant_aware import convert, freeze_ranges, prepare_qat
from .quant_integer import QuantizedTensor, integer_matmul
from .quant_model import Scheme, describe, fold_batch_norm, quantize_model
from .quant_observers import OBSERVERS
from .quantize import QuantParams, dequantize, fake_quantize, params_of_range, quantize
from .soup import ExponentialMovingAverage, StochasticWeightAverage, greedy_soup, uniform_soup, update_bn
