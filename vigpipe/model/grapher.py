"""The Grapher half of a ViG block: exchange between the nodes of a dynamic kNN graph."""

import torch
from torch import Tensor, nn

from vigpipe.choices import Norm
from vigpipe.model.aggregate import max_relative
from vigpipe.model.graph import knn_graph
from vigpipe.model.noise import KeyedDropout
from vigpipe.model.norm import make_norm
from vigpipe.model.pointwise import Pointwise


class MaxRelativeConv(nn.Module):
    """Max-relative graph convolution, arXiv:1904.03751, as ViG has it: four groups, 2C wide.

    The features and their maxima are interleaved, [x0, m0, x1, m1, ...], as published weights
    expect.
    """

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        wide = 2 * channels
        self.nn = nn.Sequential(Pointwise(wide, wide, groups=4), make_norm(norm, wide), nn.GELU())

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        """(B, N, C), (B, N, K) -> (B, N, 2C)."""
        return self.nn(torch.stack((x, max_relative(x, graph)), dim=-1).flatten(2))


class DynamicGraphConv(nn.Module):
    """The kNN graph of its own input, then the convolution; `gconv` is the published name."""

    def __init__(self, channels: int, k: int, dilation: int, norm: Norm) -> None:
        super().__init__()
        self.k, self.dilation = k, dilation
        self.gconv = MaxRelativeConv(channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, 2C)."""
        return self.gconv(x, knn_graph(x, self.k, self.dilation))

    def extra_repr(self) -> str:
        """K and dilation."""
        return f"k={self.k}, dilation={self.dilation}"


class Grapher(nn.Module):
    """Pointwise, graph convolution, pointwise, residual: arXiv:2206.00272, equation 4.

    Args:
        channels: C.
        k: neighbours per node.
        dilation: of the kNN graph.
        norm: batch, layer or group.
        drop_path: probability that a sample skips this half.
        stream: number of the drop-path mask.
    """

    def __init__(
        self, channels: int, k: int, dilation: int, norm: Norm, drop_path: float, stream: int
    ) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(Pointwise(channels, channels), make_norm(norm, channels))
        self.graph_conv = DynamicGraphConv(channels, k, dilation, norm)
        self.fc2 = nn.Sequential(Pointwise(2 * channels, channels), make_norm(norm, channels))
        self.drop_path = KeyedDropout(drop_path, stream, whole_sample=True)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return x + self.drop_path(self.fc2(self.graph_conv(self.fc1(x))), keys)
