"""Layers, losses, models and initial values."""

from ..torch_names import of_module
from . import init
from .absent import without_values
from .attention import MultiHeadAttention
from .block_attention import BlockAttention
from .containers import ModuleList, Sequential
from .conv import AvgPool2d, Conv1d, Conv2d, MaxPool2d, Reshape
from .cross_attention import CrossAttention
from .functional_call import functional_call
from .latent import LatentAttention
from .layers import GELU, Dropout, Flatten, Identity, LeakyReLU, Linear, ReLU, Sigmoid, SwiGLU, Tanh
from .linear_attention import DeltaAttention, LinearAttention
from .loss import binary_cross_entropy_with_logits, cross_entropy, linear_cross_entropy, mse_loss
from .models import ImageTransformer, ResidualBlock, lenet, mlp
from .module import Module, Parameter
from .moe import MoE
from .multi_token import MultiTokenPrediction, multi_token_loss
from .norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from .positions import Rotary
from .summary import Summary, summary
from .transformer import GPT, Embedding, TransformerBlock

__getattr__ = of_module(__name__)
__all__ = [
    "GELU", "GPT", "AvgPool2d", "BatchNorm", "BlockAttention", "Conv1d", "Conv2d", "CrossAttention",
    "DeltaAttention", "Dropout", "Embedding", "Flatten", "GroupNorm", "Identity", "ImageTransformer", "LatentAttention",
    "LayerNorm", "LeakyReLU", "Linear", "LinearAttention", "MaxPool2d", "MoE", "Module", "ModuleList",
    "MultiHeadAttention", "MultiTokenPrediction", "Parameter", "RMSNorm", "ReLU", "Reshape", "ResidualBlock", "Rotary",
    "Sequential", "Sigmoid", "Summary", "SwiGLU", "Tanh", "TransformerBlock", "binary_cross_entropy_with_logits",
    "cross_entropy", "functional_call", "init", "lenet", "linear_cross_entropy", "mlp", "mse_loss", "multi_token_loss",
    "summary", "without_values",
]
