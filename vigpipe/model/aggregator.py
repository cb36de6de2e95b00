"""Graph convolutions: combine every node with its neighbours, from C channels to 2C.

Names and shapes of the parameters are those of the authors' code, with four groups in every layer.
"""

import torch
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.aggregate import neighbour_sum, neighbours, relative
from vigpipe.model.layer import Layer


def _layer(in_channels: int, out_channels: int, norm: Norm) -> Layer:
    return Layer(in_channels, out_channels, norm, groups=4, gelu=True)


class MaxRelativeConv(nn.Module):
    """Max-relative graph convolution, arXiv:1904.03751, as ViG uses it.

    The features and their maxima are interleaved, [x0, m0, x1, m1, ...], as published weights
    expect.
    """

    fused = True

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.nn = _layer(2 * channels, 2 * channels, norm)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
        """Aggregate the neighbours of every node, and transform the result.

        Args:
            x: nodes, (B, N, C).
            graph: indices of each node's neighbours in y, (B, N, K) int64.
            y: candidates, (B, M, C); None for the nodes themselves.

        Returns:
            (B, N, 2C).
        """
        return self.nn(relative(x, graph, y, "max", fused=self.fused))


class MaxMeanConv(nn.Module):
    """Max-relative and mean-relative aggregation together, after PVG (arXiv:2308.00574).

    Features, maxima and means are interleaved as in MaxRelativeConv: [x0, m0, a0, x1, ...].
    """

    fused = True

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.nn = _layer(3 * channels, 2 * channels, norm)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
        """Aggregate the neighbours of every node, and transform the result.

        Args:
            x: nodes, (B, N, C).
            graph: indices of each node's neighbours in y, (B, N, K) int64.
            y: candidates, (B, M, C); None for the nodes themselves.

        Returns:
            (B, N, 2C).
        """
        return self.nn(relative(x, graph, y, "max_mean", fused=self.fused))


class EdgeConv(nn.Module):
    """max_j nn([x_i, y_j - x_i]): Wang et al. 2019, EdgeConv, arXiv:1801.07829."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.nn = _layer(2 * channels, 2 * channels, norm)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
        """Aggregate the neighbours of every node, and transform the result.

        Args:
            x: nodes, (B, N, C).
            graph: indices of each node's neighbours in y, (B, N, K) int64.
            y: candidates, (B, M, C); None for the nodes themselves.

        Returns:
            (B, N, 2C).
        """
        others = neighbours(x if y is None else y, graph)  # (B, N, K, C)
        x = x.unsqueeze(2).expand_as(others)
        return self.nn(torch.cat((x, others - x), dim=-1)).max(2).values


class SageConv(nn.Module):
    """nn2([x_i, max_j nn1(y_j)]): Hamilton et al. 2017, GraphSAGE, arXiv:1706.02216.

    As published, nn1's BatchNorm sees a node once for every node that it is a neighbour of.
    """

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.nn1 = _layer(channels, channels, norm)
        self.nn2 = _layer(2 * channels, 2 * channels, norm)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
        """Aggregate the neighbours of every node, and transform the result.

        Args:
            x: nodes, (B, N, C).
            graph: indices of each node's neighbours in y, (B, N, K) int64.
            y: candidates, (B, M, C); None for the nodes themselves.

        Returns:
            (B, N, 2C).
        """
        return self.nn2(
            torch.cat((x, self.nn1(neighbours(x if y is None else y, graph)).max(2).values), dim=-1)
        )


class GinConv(nn.Module):
    """nn((1 + eps) x_i + sum_j y_j): Xu et al. 2019, GIN, arXiv:1810.00826."""

    fused = True

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.nn = _layer(channels, 2 * channels, norm)
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, graph: Tensor, y: Tensor | None) -> Tensor:
        """Aggregate the neighbours of every node, and transform the result.

        Args:
            x: nodes, (B, N, C).
            graph: indices of each node's neighbours in y, (B, N, K) int64.
            y: candidates, (B, M, C); None for the nodes themselves.

        Returns:
            (B, N, 2C).
        """
        return self.nn(
            (1 + self.eps) * x + neighbour_sum(x if y is None else y, graph, fused=self.fused)
        )


AGGREGATORS: dict[str, type[nn.Module]] = {
    "max": MaxRelativeConv,
    "edge": EdgeConv,
    "sage": SageConv,
    "gin": GinConv,
    "maxmean": MaxMeanConv,
}
