"""From images to nodes."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from vigpipe.choices import Norm
from vigpipe.model.norm import make_norm
from vigpipe.model.pointwise import Pointwise

STRIDE = 16  # of ConvStem, in either direction


class ConvStem(nn.Module):
    """Five 3x3 convolutions, four of stride 2: one node a 16x16 patch, arXiv:2206.00272.

    Args:
        in_channels: channels of the images.
        channels: C of the nodes; the convolutions widen as C/8, C/4, C/2, C, C.
        norm: batch, layer or group.
    """

    def __init__(self, in_channels: int, channels: int, norm: Norm) -> None:
        super().__init__()
        widths = [in_channels, channels // 8, channels // 4, channels // 2, channels, channels]
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(widths)):
            conv = nn.Conv2d(before, after, 3, stride=2 if i < 4 else 1, padding=1)
            nn.init.kaiming_normal_(conv.weight)
            nn.init.zeros_(conv.bias)  # pyright: ignore[reportArgumentType]
            layers += [conv, make_norm(norm, after), nn.GELU()]
        self.convs = nn.Sequential(*layers[:-1])  # no GELU after the last

    def forward(self, images: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, N, C), N = H/16 * W/16 in raster order."""
        x = images.contiguous(memory_format=torch.channels_last)
        for layer in self.convs:
            # Under channels-last strides the norms' view of (B, C, H, W) as (B, H, W, C) copies
            # nothing.
            x = layer(x) if isinstance(layer, nn.Conv2d) else layer(x.movedim(1, -1)).movedim(-1, 1)
        return x.flatten(2).transpose(1, 2)


class PixelStem(nn.Module):
    """One node a pixel: a pointwise map from the image's channels to the node's.

    Args:
        in_channels: channels of the images.
        channels: C of the nodes.
        norm: batch, layer or group.
    """

    def __init__(self, in_channels: int, channels: int, norm: Norm) -> None:
        super().__init__()
        self.convs = nn.Sequential(Pointwise(in_channels, channels), make_norm(norm, channels))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, N, C), N = H * W in raster order."""
        return self.convs(images.flatten(2).transpose(1, 2))
