"""Models for images of handwritten digits. All take (n, 784) and give logits (n, 10)."""

from ..autodiff import ops
from ..backend import xp
from . import init
from .containers import Sequential
from .conv import Conv2d, MaxPool2d, Reshape
from .layers import Dropout, Flatten, Linear, ReLU
from .module import Module, at_least_1
from .norm import BatchNorm, LayerNorm
from .transformer import Embedding, TransformerBlock


def mlp(widths=(512, 512), dropout=0.0, dtype=xp.float32):
    """784 -> widths, each with ReLU (and dropout) -> 10; He initialisation."""
    layers, inside = [], 784
    for width in widths:
        layers += [Linear(inside, width, dtype=dtype, weight_init=init.he_normal), ReLU()]
        layers += [Dropout(dropout)] if dropout else []
        inside = width
    return Sequential(*layers, Linear(inside, 10, dtype=dtype, weight_init=init.he_normal))


def lenet(dropout=0.0, dtype=xp.float32):
    """LeNet-5 with ReLU and max pooling: two convolutions, three linear layers, 61,706 parameters.
    Source: LeCun et al. 1998."""
    he = {"dtype": dtype, "weight_init": init.he_normal}
    return Sequential(
        Reshape(1, 28, 28),
        Conv2d(1, 6, 5, padding=2, **he), ReLU(), MaxPool2d(2),
        Conv2d(6, 16, 5, **he), ReLU(), MaxPool2d(2),
        Flatten(), Linear(400, 120, **he), ReLU(), *([Dropout(dropout)] if dropout else []),
        Linear(120, 84, **he), ReLU(), Linear(84, 10, **he))


class ResidualBlock(Module):
    """relu(x + conv(relu(conv(x)))), each convolution followed by batch norm; a 1×1 convolution fits x where the
    channels or the stride change. (n, in, h, w) -> (n, out, h', w'). Source: He et al. 2016."""

    def __init__(self, in_channels, out_channels, stride=1, dtype=xp.float32):
        super().__init__()
        he = {"bias": False, "dtype": dtype, "weight_init": init.he_normal}
        self.conv1 = Conv2d(in_channels, out_channels, 3, stride, 1, **he)
        self.norm1 = BatchNorm(out_channels, dtype=dtype)
        self.conv2 = Conv2d(out_channels, out_channels, 3, 1, 1, **he)
        self.norm2 = BatchNorm(out_channels, dtype=dtype)
        fits = stride == 1 and in_channels == out_channels
        self.fit = None if fits else Conv2d(in_channels, out_channels, 1, stride, **he)

    def forward(self, x):
        y = self.norm2(self.conv2(ops.relu(self.norm1(self.conv1(x)))))
        return ops.relu(y + (x if self.fit is None else self.fit(x)))


class ImageTransformer(Module):
    """The image as a sequence, transformer blocks, the mean over the sequence -> logits.

    pieces  "patches": 16 of 7×7 pixels; "rows": 28 of 28 pixels
    Source: Dosovitskiy et al. 2021, "An image is worth 16×16 words".
    """

    PIECES = {"patches": (16, 49), "rows": (28, 28)}

    def __init__(self, pieces="patches", layers=2, heads=4, dim=64, dropout=0.0, dtype=xp.float32):
        super().__init__()
        if pieces not in self.PIECES:
            raise ValueError(f"ImageTransformer: pieces={pieces!r}; use one of {sorted(self.PIECES)}")
        layers, heads, dim = at_least_1("ImageTransformer", layers=layers, heads=heads, dim=dim)
        self.pieces = pieces
        count, size = self.PIECES[pieces]
        self.embed = Linear(size, dim, dtype=dtype, weight_init=init.xavier_normal)
        self.position = Embedding(count, dim, dtype, std=0.02)
        self.dropout = Dropout(dropout)
        self.blocks = Sequential(*(TransformerBlock(dim, heads, dropout=dropout, dtype=dtype) for _ in range(layers)))
        self.norm = LayerNorm(dim, dtype=dtype)
        self.head = Linear(dim, 10, dtype=dtype, weight_init=init.xavier_normal)

    def cut(self, images):
        """(n, 784) -> (n, pieces, pixels)."""
        if self.pieces == "rows":
            return ops.reshape(images, (len(images), 28, 28))
        grid = ops.reshape(images, (len(images), 4, 7, 4, 7))
        return ops.reshape(ops.transpose(grid, (0, 1, 3, 2, 4)), (len(images), 16, 49))

    def forward(self, images):
        x = self.dropout(self.embed(self.cut(images)) + self.position.weight)
        return self.head(ops.mean(self.norm(self.blocks(x)), axis=1))
