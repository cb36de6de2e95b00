"""Graph convolutions: combine every node with its neighbours, from C channels to 2C.

Names and shapes of the parameters are those of the authors' code, with four groups in every layer.

Sub-networks (`model.slicing`) divide the channels inside each of the four groups, so that the
groups of a narrow convolution are parts of those of the wide one. All four groups have the same
columns of a weight, so a sub-network has the same channels of each group.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.aggregate import Candidates, neighbour_sum, neighbours, relative
from vigpipe.model.layer import Layer
from vigpipe.model.slicing import Roles, Side, within

_GROUPS = 4


def _layer(in_channels: int, out_channels: int, norm: Norm) -> Layer:
    return Layer(in_channels, out_channels, norm, groups=_GROUPS, gelu=True)


def _channels(parts: int, run: int = 1) -> dict[str, Side]:
    """Return the sides of an input of equal parts, of what the layer takes, and of the output."""
    return {
        "x": Side("x", repeats=parts),
        "in": Side("x", run=run),
        "out": Side("out", repeats=_GROUPS),
    }


class Aggregator(nn.Module):
    """A graph convolution, from C channels to 2C.

    `channels` has the side that each role stands for. The sides' groups are `x`, the channels of
    one of the equal parts of the input, and `out`, those of one of the four parts of the output.
    """

    channels: ClassVar[Mapping[str, Side]]
    roles: ClassVar[Roles]

    def forward(self, x: Tensor, graph: Tensor, y: Candidates) -> Tensor:
        """Aggregate, with the arguments of `model.aggregate`, and transform: (B, N, 2C)."""
        raise NotImplementedError


class _OneLayerConv(Aggregator):
    """A graph convolution with one layer, each group of which takes the channels of one part."""

    roles: ClassVar[Roles] = within("nn.", Layer.roles)

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        taken = _GROUPS * self.channels["in"].run // self.channels["x"].repeats
        self.nn = _layer(taken * channels, 2 * channels, norm)


class MaxRelativeConv(_OneLayerConv):
    """Max-relative convolution, arXiv:1904.03751, interleaved as published: [x0, m0, x1, ...]."""

    fused = True
    mode: ClassVar[str] = "max"
    channels = _channels(4, run=2)

    def forward(self, x: Tensor, graph: Tensor, y: Candidates) -> Tensor:
        return self.nn(relative(x, graph, y, self.mode, fused=self.fused))


class MaxMeanConv(MaxRelativeConv):
    """Maxima and means together, after PVG (arXiv:2308.00574): [x0, m0, a0, x1, ...]."""

    mode: ClassVar[str] = "max_mean"
    channels = _channels(4, run=3)


class EdgeConv(_OneLayerConv):
    """max_j nn([x_i, y_j - x_i]): Wang et al. 2019, EdgeConv, arXiv:1801.07829."""

    channels = _channels(2)  # two of the four groups take x_i, a half each, two the difference

    def forward(self, x: Tensor, graph: Tensor, y: Candidates) -> Tensor:
        others = neighbours(x, graph, y)  # (B, N, K, C)
        x = x.unsqueeze(2).expand_as(others)
        return self.nn(torch.cat((x, others - x), dim=-1)).max(2).values


class SageConv(Aggregator):
    """nn2([x_i, max_j nn1(y_j)]): Hamilton et al. 2017, GraphSAGE, arXiv:1706.02216.

    As published, nn1's BatchNorm sees a node once for every node that it is a neighbour of. Two of
    nn2's groups take x_i, a half each, and two what nn1 gives. The same columns of its weight stand
    for both, so a sub-network has the same channels of what nn1 takes and gives.
    """

    channels: ClassVar[Mapping[str, Side]] = {**_channels(4), "half": Side("x", repeats=2)}
    roles: ClassVar[Roles] = {
        **within("nn1.", Layer.roles, {"out": "x"}),
        **within("nn2.", Layer.roles, {"in": "half"}),
    }

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.nn1 = _layer(channels, channels, norm)
        self.nn2 = _layer(2 * channels, 2 * channels, norm)

    def forward(self, x: Tensor, graph: Tensor, y: Candidates) -> Tensor:
        others = neighbours(x, graph, y)  # (B, N, K, C)
        return self.nn2(torch.cat((x, self.nn1(others).max(2).values), dim=-1))


class GinConv(_OneLayerConv):
    """nn((1 + eps) x_i + sum_j y_j): Xu et al. 2019, GIN, arXiv:1810.00826."""

    fused = True
    channels = _channels(4)
    roles: ClassVar[Roles] = {**_OneLayerConv.roles, "eps": (None,)}

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__(channels, norm)
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, graph: Tensor, y: Candidates) -> Tensor:
        total = (1 + self.eps) * x + neighbour_sum(x, graph, y, fused=self.fused)
        return self.nn(total)


AGGREGATORS: dict[str, type[Aggregator]] = {
    "max": MaxRelativeConv,
    "edge": EdgeConv,
    "sage": SageConv,
    "gin": GinConv,
    "maxmean": MaxMeanConv,
}
