"""Convolutions that turn images into nodes, and those that halve the grid of a pyramid."""

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.keyed_dropout import Draws
from vigpipe.model.norm import NORM_ROLES, apply_norm, fold_in_place, make_norm
from vigpipe.model.slicing import CONV_ROLES, Roles, within


class ConvStem(nn.Module):
    """3x3 convolutions, each with a norm, with GELU between them; every output pixel is a node.

    ViG's stem for 224x224 images has five convolutions of widths C/8, C/4, C/2, C, C. All but the
    last have stride 2, so that one node stands for a 16x16 patch (arXiv:2206.00272, reference code
    `vig_pytorch/vig.py`). With `ends_in_gelu`, GELU follows the last one, too.
    """

    def __init__(
        self,
        in_channels: int,
        widths: tuple[int, ...],
        strides: tuple[int, ...],
        norm: Norm,
        ends_in_gelu: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for (before, after), stride in zip(pairwise((in_channels, *widths)), strides, strict=True):
            layers += [convolution(before, after, 3, stride), make_norm(norm, after), nn.GELU()]
        # Published names number the GELUs too.
        self.convs = nn.Sequential(*(layers if ends_in_gelu else layers[:-1]))

    @property
    def roles(self) -> Roles:
        """Roles of the dimensions: the channels before each convolution, by its index as text."""
        roles: dict[str, tuple[str | None, ...]] = {}
        for i in range(0, len(self.convs), 3):
            names = {"in": str(i // 3), "out": str(i // 3 + 1)}
            roles |= within(f"convs.{i}.", CONV_ROLES, names)
            roles |= within(f"convs.{i + 1}.", NORM_ROLES, names)
        return roles

    def forward(self, images: Tensor) -> Tensor:
        """Turn images into nodes: (B, C_in, H, W) -> (B, H', W', C)."""
        x = images.contiguous(memory_format=torch.channels_last)
        for i in range(0, len(self.convs), 3):
            conv, norm = self.convs[i : i + 2]
            has_gelu = i + 2 < len(self.convs)
            # Under channels-last strides, viewing (B, C, H, W) as (B, H, W, C) copies nothing.
            y = conv(x).movedim(1, -1).contiguous()
            x = apply_norm(norm, y, gelu=has_gelu).movedim(-1, 1)
        return x.movedim(1, -1).contiguous()  # copies nothing either

    def fuse(self) -> "ConvStem":
        for i in range(0, len(self.convs), 3):
            fold_in_place(self.convs, i)
        return self


class Downsample(nn.Module):
    """Halve height and width and change the channels, between two stages of a pyramid."""

    roles: ClassVar[Roles] = {**within("conv.0.", CONV_ROLES), **within("conv.1.", NORM_ROLES)}

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            convolution(in_channels, out_channels, 3, stride=2),
            make_norm(norm, out_channels),
        )

    def forward(self, x: Tensor, draws: Draws | None = None) -> Tensor:
        """Downsample: (B, H, W, C_in) -> (B, H / 2, W / 2, C_out), sides rounded up.

        Like other blocks it may be given draws, but it makes no random choice.
        """
        conv, norm = self.conv
        return norm(conv(x.movedim(-1, 1)).movedim(1, -1).contiguous())

    def fuse(self) -> "Downsample":
        fold_in_place(self.conv)
        return self


def convolution(
    in_channels: int, out_channels: int, side: int, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """Make a convolution of side x side pixels that keeps the size of images, but for its stride.

    The initial weights are as in the authors' code.
    """
    conv = nn.Conv2d(in_channels, out_channels, side, stride, side // 2, groups=groups)
    nn.init.kaiming_normal_(conv.weight)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv
