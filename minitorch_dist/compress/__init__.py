"""Smaller models: numbers of few bits, fewer weights, students of a large one, averages of several."""

from .quant_aware import convert, freeze_ranges, prepare_qat
from .quant_integer import QuantizedTensor, integer_matmul
from .quant_model import Scheme, describe, fold_batch_norm, quantize_model
from .quant_observers import OBSERVERS
from .quantize import QuantParams, dequantize, fake_quantize, params_of_range, quantize
