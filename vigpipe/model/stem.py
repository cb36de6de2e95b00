"""From images to nodes."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.norm import fold_for_good, make_norm, normed


class ConvStem(nn.Module):
    """3x3 convolutions with norm and GELU between them, one node for each pixel of the last map.

    ViG's stem for 224x224 has five, of widths C/8, C/4, C/2, C, C, all but the last of stride 2:
    one node a 16x16 patch (arXiv:2206.00272, reference code `vig_pytorch/vig.py`).

    Args:
        in_channels: channels of the images.
        widths: channels after each convolution; the last is C.
        strides: of each convolution.
        norm: batch, layer or group.
    """

    def __init__(
        self, in_channels: int, widths: tuple[int, ...], strides: tuple[int, ...], norm: Norm
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for (before, after), stride in zip(pairwise((in_channels, *widths)), strides, strict=True):
            layers += [conv3x3(before, after, stride), make_norm(norm, after), nn.GELU()]
        self.convs = nn.Sequential(*layers[:-1])  # their names are published: GELUs count

    def forward(self, images: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, H', W', C), one node a pixel of the last map."""
        x = images.contiguous(memory_format=torch.channels_last)
        for i in range(0, len(self.convs), 3):
            conv, norm = self.convs[i : i + 2]
            has_gelu = i + 2 < len(self.convs)  # not after the last
            # Under channels-last strides, viewing (B, C, H, W) as (B, H, W, C) copies nothing.
            y = conv(x).movedim(1, -1).contiguous()
            x = normed(norm, y, gelu=has_gelu).movedim(-1, 1)
        return x.movedim(1, -1).contiguous()  # free too

    def fuse(self) -> "ConvStem":
        """Fold the norms for good: what `timm.utils.reparameterize_model` asks for."""
        for i in range(0, len(self.convs), 3):
            fold_for_good(self.convs, i)
        return self


class Downsample(nn.Module):
    """Half the height and the width, more channels: between two stages of a pyramid."""

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            conv3x3(in_channels, out_channels, stride=2), make_norm(norm, out_channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C_in) -> (B, H / 2, W / 2, C_out), rounded up."""
        conv, norm = self.conv
        return norm(conv(x.movedim(-1, 1)).movedim(1, -1).contiguous())

    def fuse(self) -> "Downsample":
        """Fold the norm for good."""
        fold_for_good(self.conv)
        return self


def conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    """A 3x3 convolution with the published initial weights."""
    conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1)
    nn.init.kaiming_normal_(conv.weight)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv
