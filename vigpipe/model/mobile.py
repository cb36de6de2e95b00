"""Vision GNNs without kNN: convolutions and graphs along rows and columns, from 2023 on.

MobileViG (Munir et al. 2023, arXiv:2307.00395), MobileViGv2 (Avery et al. 2024, arXiv:2406.05695),
GreedyViG (Munir et al. 2024, arXiv:2405.06849), AdaptViG (Munir et al. 2025) and LogViG (Munir et
al. 2025, arXiv:2510.13740), whose code is SLDGroup/MobileViG, MobileViGv2 and GreedyViG, and
mmunir127/AdaptViG and LogViG-Official. Every resolution has local blocks, inverted residuals, and
then graph blocks, a Grapher and an FFN. LogViG has a second branch of high resolution beside all
blocks. `model.published` has the names of the parameters in the authors' files.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.config.typed import typed
from vigpipe.errors import InputError
from vigpipe.model.axial import AttentionConv, AxialConv, LinkKind
from vigpipe.model.blocks import reduced
from vigpipe.model.ffn import FFN
from vigpipe.model.graph import check_finite
from vigpipe.model.image import ImageModel, Pool, as_pair
from vigpipe.model.keyed_dropout import Draws, DropPath
from vigpipe.model.layer import Layer
from vigpipe.model.norm import apply_norm, fold_in_place, make_norm
from vigpipe.model.pointwise import Pointwise
from vigpipe.model.position import Grid
from vigpipe.model.readout import Readout
from vigpipe.model.regions import region
from vigpipe.model.stem import ConvStem, Downsample, convolution

_FIRST_SCALE = 1e-5  # of a residual branch with layer scale


@dataclass(frozen=True)
class Family:
    """What the variants of a family have in common."""

    links: LinkKind
    doubles: bool = False  # the graph convolution gives 2C channels instead of C
    has_position: bool = True  # a Grapher begins with a position encoding
    has_scale: bool = True  # graph blocks have layer scale, as all local blocks do
    attends: bool = False  # at the last resolution, attention over all nodes replaces the links
    # Whether the drop-path rate rises over the local blocks, too.
    rises_in_local: bool = True
    has_branch: bool = False  # a second branch goes from the stem to the readout


FAMILIES = {
    "mobilevig": Family("every", doubles=True, has_position=False, has_scale=False),
    "mobilevigv2": Family("four", rises_in_local=False),
    "greedyvig": Family("near"),
    "adaptvig": Family("soft", attends=True),
    "logvig": Family("powers", doubles=True, has_branch=True),
}


@dataclass(frozen=True)
class MobileShape:
    """The sizes that distinguish the variants of a family."""

    family: Literal["mobilevig", "mobilevigv2", "greedyvig", "adaptvig", "logvig"]
    blocks: tuple[tuple[int, int], ...]  # local blocks and graph blocks of each resolution
    channels: tuple[int, ...]  # C of each resolution
    hidden: int  # channels of the readout's hidden layer
    k: tuple[int, ...]  # K of each resolution; see `axial.LinkKind`
    stem_strides: tuple[int, ...] = (2, 2)  # of the stem's convolutions, of widths C / 2 and C
    img_size: Grid = (224, 224)  # of the images that the variant is designed for, in pixels

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def stem_widths(self) -> tuple[int, ...]:
        return self.channels[0] // 2, self.channels[0]

    @property
    def halvings(self) -> int:
        return 1 if self.traits.has_branch else len(self.blocks) - 1


class Depthwise(nn.Sequential):
    """A depth-wise 3x3 convolution, a norm and GELU, on features with channels last."""

    def __init__(self, channels: int, norm: Norm) -> None:
        conv = convolution(channels, channels, 3, groups=channels)
        super().__init__(conv, make_norm(norm, channels))

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override-param-name]
        """Convolve: (B, H, W, C) -> (B, H, W, C)."""
        conv, norm = self
        return apply_norm(norm, conv(x.movedim(-1, 1)).movedim(1, -1).contiguous(), gelu=True)

    def fuse(self) -> "Depthwise":
        fold_in_place(self)
        return self


class LocalBlock(nn.Module):
    """Pointwise to 4C, depth-wise 3x3, pointwise to C, residual: the inverted residual.

    MobileNetV2 (arXiv:1801.04381), with GELU and layer scale.
    """

    def __init__(self, channels: int, norm: Norm, drop_path: float, number: int) -> None:
        super().__init__()
        hidden = 4 * channels
        self.fc1 = Layer(channels, hidden, norm, gelu=True)
        self.mid = Depthwise(hidden, norm)
        self.fc2 = Layer(hidden, channels, norm, scale=_FIRST_SCALE)
        self.drop_path = DropPath(drop_path, stream=2 * number)
        self.detect_anomaly = ""  # name of the block for the error; empty switches the check off

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:
        """Run the block: (B, H, W, C) -> (B, H, W, C)."""
        y = self.fc1(x)
        if self.detect_anomaly:
            check_finite(y.flatten(1, 2), self.detect_anomaly)
        return self.fc2(self.mid(y), x, self.drop_path(x, draws))


class PositionEncoding(nn.Module):
    """Add a depth-wise 7x7 convolution of the features to them (arXiv:2102.10882)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = convolution(channels, channels, 7, groups=channels)
        self.adds_input = True

    def forward(self, x: Tensor) -> Tensor:
        """Add to features: (B, H, W, C) -> (B, H, W, C)."""
        y = self.conv(x.movedim(-1, 1)).movedim(1, -1)
        return x + y if self.adds_input else y.contiguous()

    @torch.no_grad()
    def fuse(self) -> "PositionEncoding":
        """Let the centre of the convolution add the features."""
        if self.adds_input:
            self.conv.weight[..., 3, 3] += 1
            self.adds_input = False
        return self


class AxialGrapher(nn.Module):
    """Position encoding, pointwise, graph convolution, pointwise, residual."""

    def __init__(
        self,
        shape: MobileShape,
        resolution: int,
        norm: Norm,
        drop_path: float,
        number: int,
    ) -> None:
        super().__init__()
        traits, channels = shape.traits, shape.channels[resolution]
        width = 2 * channels if traits.doubles else channels
        self.position = PositionEncoding(channels) if traits.has_position else None
        self.fc1 = Layer(channels, channels, norm)
        self.graph_conv: nn.Module
        if traits.attends and resolution == len(shape.channels) - 1:
            self.graph_conv = AttentionConv(channels, width, norm)
        else:
            self.graph_conv = AxialConv(channels, width, traits.links, shape.k[resolution], norm)
        self.fc2 = Layer(width, channels, norm, scale=_FIRST_SCALE if traits.has_scale else None)
        self.drop_path = DropPath(drop_path, stream=2 * number)
        self.detect_anomaly = ""  # name of the block for the error; empty switches the check off

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:
        y = self.fc1(x if self.position is None else self.position(x))
        if self.detect_anomaly:
            check_finite(y.flatten(1, 2), self.detect_anomaly)
        return self.fc2(self.graph_conv(y), x, self.drop_path(x, draws))


class GraphBlock(nn.Sequential):
    """A Grapher and an FFN."""

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:  # pyrefly: ignore[bad-override]
        """Run the block: (B, H, W, C) -> (B, H, W, C)."""
        grapher, ffn = self
        x = region("grapher", grapher, x, draws)
        return region("ffn", ffn, x, draws)


class RandomPointwise(nn.Module):
    """A 1x1 convolution as torch makes one, not learned, in no state dict, and always the same."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = out_channels, in_channels + 1  # the bias is the last column
        numbers = torch.rand(shape, generator=generator, device="cpu")
        self.numbers = in_channels**-0.5 * (2 * numbers - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve: (B, ..., C_in) -> (B, ..., C_out)."""
        numbers = self.numbers.to(x)
        return F.linear(x, numbers[:, :-1], numbers[:, -1])


class Merge(nn.Module):
    """Resize the features of the blocks to the second branch's grid, add both, 1x1, norm, GELU.

    To give the branch as many channels as the features have, the published code makes a new random
    convolution at every call, which no file holds. By default there is a learned one; with
    `as_random` one that is not learned and in no state dict, and is the same in every model.
    """

    def __init__(self, branch: int, channels: int, norm: Norm, as_random: bool) -> None:
        super().__init__()
        self.adjust = (RandomPointwise if as_random else Pointwise)(branch, channels)
        self.conv = Layer(channels, channels, norm, gelu=True)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Merge (B, H, W, C) and the branch, (B, H', W', C'): (B, H', W', C), added in float32."""
        wide, size = torch.promote_types(x.dtype, torch.float32), branch.shape[1:3]
        nodes = x.to(wide)
        if x.shape[1:3] != size:
            nodes = F.interpolate(nodes.movedim(-1, 1), size=size, mode="bilinear").movedim(1, -1)
        return self.conv((nodes + self.adjust(branch).to(wide)).to(x.dtype))


class MobileGnn(ImageModel):
    """A Vision GNN without kNN: stem, local and graph blocks at several resolutions, readout.

    Images may have any size: links that leave the grid lead to the node itself. LogViG's second
    branch is of the stem, and its merging of the readout; between them it goes past all blocks.

    Args:
        shape: the sizes of the variant.
        num_classes: number of logits; with 0 the model returns the readout's hidden layer.
        in_chans: channels of the images.
        img_size: height and width of the images in pixels, or one number for both; by default the
            variant's.
        norm: normalisation: batch, layer or group.
        drop_path_rate: drop-path rate of the last block; the rate rises linearly from 0 in the
            first. In MobileViGv2 it rises over graph blocks alone, as if there were as many of them
            as of all blocks, so that it stays lower.
        drop_rate: dropout rate in the readout.
        dist_head: have the second head, for the answers of a teacher; see `Readout`.
        compat: `reference` leaves a convolution of LogViG random; see `Merge`.
        global_pool: `avg` averages the nodes; an empty string gives every node its own logits.
        device: where to make the weights.
        dtype: type of the weights.

    Raises:
        InputError: a size or rate that no model has, or `compat` for a model without quirks.
    """

    stem_names = ("stem", "high_res_branch")
    readout_names = ("merge", "prediction")

    @typed
    def __init__(
        self,
        shape: MobileShape,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | Grid | None = None,
        norm: Norm = "batch",
        drop_path_rate: float = 0.0,
        drop_rate: float = 0.0,
        dist_head: bool = True,
        compat: Literal["reference"] | None = None,
        global_pool: Pool = "avg",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        traits, num_blocks = shape.traits, sum(map(sum, shape.blocks))
        if compat is not None and not traits.has_branch:
            raise InputError(
                f"--compat {compat}: {shape.family} has no quirks that change its results; leave "
                "it out"
            )
        super().__init__(
            num_blocks=num_blocks + len(shape.blocks) - 1,
            num_classes=num_classes,
            in_chans=in_chans,
            img_size=as_pair(shape.img_size if img_size is None else img_size),
            strides=shape.stem_strides,
            channels=shape.channels,
            hidden=shape.hidden,
            global_pool=global_pool,
            drop_path_rate=drop_path_rate,
            drop_rate=drop_rate,
            most_heads=2 if dist_head else 1,
        )
        self.shape = shape
        with torch.device(device) if device is not None else nullcontext():
            strides = shape.stem_strides
            self.stem = ConvStem(in_chans, shape.stem_widths, strides, norm, ends_in_gelu=True)
            self.high_res_branch = self.merge = None
            if traits.has_branch:
                first, second, *_ = shape.channels
                widths = second // 2, second
                self.high_res_branch = ConvStem(first, widths, (2, 1), norm, ends_in_gelu=True)
            self.backbone = nn.ModuleDict()
            self._resolutions: list[int] = []  # that each block gives
            for resolution, block in _make_blocks(shape, norm, drop_path_rate):
                self.backbone[str(len(self.backbone))] = block
                self._resolutions.append(resolution)
            if traits.has_branch:
                ends = shape.channels[1], shape.channels[-1]
                self.merge = Merge(*ends, norm, as_random=compat == "reference")
            self.prediction = Readout(
                shape.channels[-1],
                num_classes,
                norm,
                drop_rate,
                2 * num_blocks,
                global_pool,
                shape.hidden,
                self.most_heads,
            )
        lasts = {resolution: i for i, resolution in enumerate(self._resolutions)}
        self.feature_info = [
            {
                "num_chs": shape.channels[resolution],
                "reduction": 2 ** (shape.stem_strides.count(2) + resolution),
                "module": f"backbone.{block}",
            }
            for resolution, block in lasts.items()
        ]
        if dtype is not None:
            self.to(dtype)

    def boundary_shapes(self, block: int) -> tuple[tuple[int, ...], ...]:
        """Return (H, W, C), and the same of the second branch if there is one."""
        resolution = 0 if block == 0 else self._resolutions[block - 1]
        shape = (*reduced(self.grid, (2,) * resolution), self.shape.channels[resolution])
        if not self.shape.traits.has_branch:
            return (shape,)
        return shape, (*reduced(self.grid, (2,)), self.shape.channels[1])

    def embed(self, images: Tensor) -> Any:
        return self.branched(self.stem(images))

    def branched(self, x: Tensor) -> Any:
        return x if self.high_res_branch is None else (x, self.high_res_branch(x.movedim(-1, 1)))

    def run_blocks(self, x: Any, draws: Draws | None) -> Any:
        if not isinstance(x, tuple):
            return super().run_blocks(x, draws)
        nodes, branch = x
        return super().run_blocks(nodes, draws), branch

    def run_each(self, x: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(x, tuple):
            yield from super().run_each(x)
            return
        nodes, branch = x
        for name, result in super().run_each(nodes):
            yield name, (result, branch)

    def merged(self, x: Any) -> Tensor:
        return x if self.merge is None else self.merge(*x)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if not self.has_readout:  # nothing is left that the second branch could be merged with
            self.high_res_branch = self.merge = None
        return taken

    def slicing(self, partition_input: bool = False) -> NoReturn:
        raise InputError(
            f"--strategy subnetworks: the channels of {self.shape.family} models cannot be "
            "divided; choose another --strategy, or a ViG"
        )


def _make_blocks(
    shape: MobileShape, norm: Norm, drop_path_rate: float
) -> Iterator[tuple[int, nn.Module]]:
    """Make the blocks and downsamplings in order; yield the resolution that each gives, and it."""
    traits, index, number = shape.traits, 0, 0
    rates = torch.linspace(0, drop_path_rate, sum(map(sum, shape.blocks)), device="cpu").tolist()
    for resolution, (num_local, num_graph) in enumerate(shape.blocks):
        channels = shape.channels[resolution]
        if resolution > 0:
            yield resolution, Downsample(shape.channels[resolution - 1], channels, norm)
        for _ in range(num_local):
            yield resolution, LocalBlock(channels, norm, rates[index], number)
            number += 1
            if traits.rises_in_local:
                index += 1
        for _ in range(num_graph):
            scale = _FIRST_SCALE if traits.has_scale else None
            grapher = AxialGrapher(shape, resolution, norm, rates[index], number)
            ffn = FFN(channels, 4 * channels, norm, rates[index], 2 * number + 1, scale=scale)
            yield resolution, GraphBlock(grapher, ffn)
            index, number = index + 1, number + 1
