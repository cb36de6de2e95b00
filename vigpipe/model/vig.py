"""The isotropic ViG: Han et al. 2022, "Vision GNN", arXiv:2206.00272.

Parameter names and shapes are those of the authors' code (huawei-noah/Efficient-AI-Backbones,
vig_pytorch), so published state dicts fit.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from vigpipe.choices import Norm
from vigpipe.errors import InputError
from vigpipe.model.ffn import FFN
from vigpipe.model.graph import check_neighbours
from vigpipe.model.grapher import Grapher
from vigpipe.model.readout import Readout
from vigpipe.model.staged import StagedModel
from vigpipe.model.stem import ConvStem

# For each convolution of a stem: what C is divided by to give its width, and its stride.
STEMS = {
    "patch16": ((8, 2), (4, 2), (2, 2), (1, 2), (1, 1)),
    "pixel": ((2, 1), (1, 1)),
}


@dataclass(frozen=True)
class VigShape:
    """What tells one isotropic variant from another.

    Attributes:
        num_blocks: Grapher + FFN pairs.
        channels: C of every node.
        k: neighbours in the first and in the last block, rising linearly between them.
        stem: one node a 16x16 patch, or one a pixel.
    """

    num_blocks: int
    channels: int
    k: tuple[int, int] = (9, 18)
    stem: Literal["patch16", "pixel"] = "patch16"


class Block(nn.Sequential):
    """A Grapher and an FFN; the published names are `0` and `1`."""

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(B, N, C) -> (B, N, C)."""
        for half in self:
            x = half(x, keys)
        return x


class Vig(StagedModel):
    """Stem, positional embedding, blocks on dynamic kNN graphs, readout.

    Args:
        shape: the variant.
        num_classes: width of the logits.
        in_channels: channels of the images.
        image_size: height and width of the images.
        norm: batch, layer or group.
        drop_path: rate in the last block, rising linearly from 0 in the first.
        dropout: rate in the readout.

    Raises:
        InputError: the images give too few nodes for a block's k * dilation, or do not divide into
            patches.
    """

    stem_names = ("stem", "pos_embed")
    blocks_name = "backbone"
    readout_names = ("prediction",)

    def __init__(
        self,
        shape: VigShape,
        num_classes: int = 1000,
        in_channels: int = 3,
        image_size: tuple[int, int] = (224, 224),
        norm: Norm = "batch",
        drop_path: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        strides = tuple(stride for _, stride in STEMS[shape.stem])
        stride = prod(strides)
        if image_size[0] % stride or image_size[1] % stride:
            raise InputError(
                f"images are {image_size[0]}x{image_size[1]}, but this model cuts them into "
                f"patches of {stride}x{stride}; choose a multiple of {stride} as "
                "--image-size"
            )
        height, width = image_size[0] // stride, image_size[1] // stride
        num_nodes, num_blocks, channels = height * width, shape.num_blocks, shape.channels
        super().__init__(num_nodes, channels, num_classes)

        widths = tuple(channels // divisor for divisor, _ in STEMS[shape.stem])
        self.stem = ConvStem(in_channels, widths, strides, norm)
        self.pos_embed = nn.Parameter(torch.zeros(1, channels, height, width))

        # As the reference computes them: in float32, and truncated.
        neighbours = [int(k) for k in torch.linspace(*shape.k, num_blocks, device="cpu").tolist()]
        drop_paths = torch.linspace(0, drop_path, num_blocks, device="cpu").tolist()
        most_dilation = max(num_nodes // max(neighbours), 1)
        self.backbone = nn.ModuleDict()
        for i in range(num_blocks):
            k, dilation = neighbours[i], min(i // 4 + 1, most_dilation)
            check_neighbours(k, dilation, num_nodes)
            self.backbone[str(i)] = Block(
                Grapher(channels, k, dilation, norm, drop_paths[i], stream=2 * i),
                FFN(channels, norm, drop_paths[i], stream=2 * i + 1),
            )
        self.prediction = Readout(channels, num_classes, norm, dropout, stream=2 * num_blocks)

    def embed(self, images: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, N, C)."""
        return self.stem(images) + self.pos_embed.flatten(2).transpose(1, 2)

    def read_out(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """(B, N, C) -> (B, num_classes)."""
        return self.prediction(x, keys)
