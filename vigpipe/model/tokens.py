"""Protocols with which a ViG reaches the nodes of an image that other ranks have.

Where several ranks share every image, each has some rows of the grid of nodes, (B, H_k, W, C) of
(B, H, W, C). A rank computes alone what concerns single nodes; whatever combines nodes goes through
`Tokens`, an attribute of the modules that is None where a process has whole images.
`vigpipe.data.tokens` implements the protocols: models know nothing of ranks.
"""

from typing import Protocol

from torch import Tensor, nn

from vigpipe.model.position import Grid


class SharedNodes(Protocol):
    """The nodes that a block makes a graph of, and averages of them where neighbours are pooled.

    A rank passes the features of its own nodes, x, (B, n_k, C). A graph has the indices of the
    neighbours of all nodes, (B, N, K) int64. With `fused`, the fused operator is used where there
    is one.
    """

    def nearest(
        self,
        x: Tensor,
        k: int,
        dilation: int,
        bias: Tensor | None,
        ranks: Tensor | None,
        *,
        fused: bool,
    ) -> Tensor:
        """Give every rank the graph of all nodes; see `vigpipe.model.graph.knn_graph`."""
        ...

    def reduced(self, x: Tensor, graph: Tensor, mode: str, *, fused: bool) -> Tensor:
        """Reduce neighbours as `ops.aggregate` does: (B, n_k, C * outputs), by channel."""
        ...

    def neighbours(self, x: Tensor, graph: Tensor) -> Tensor:
        """Gather the features of the neighbours of the rank's nodes: (B, n_k, K, C)."""
        ...


class Tokens(Protocol):
    """The rank's rows of images, and operations that need the rows of other ranks."""

    def own(self, x: Tensor) -> Tensor:
        """Take the rank's rows of whole images: (B, H, W, C) -> (B, H_k, W, C)."""
        ...

    def whole(self, x: Tensor, grid: Grid) -> Tensor:
        """Gather the rows of all ranks on every rank: (B, H_k, W, C) -> (B, H, W, C)."""
        ...

    def mean(self, x: Tensor) -> Tensor:
        """Average the nodes of all ranks: (B, H_k, W, C) -> (B, C)."""
        ...

    def normalised(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Normalise features of the rank's nodes, (B, ..., C), with the statistics of all."""
        ...

    def nodes(self, grid: Grid, reduction: int) -> SharedNodes:
        """Return the nodes of a grid, whose candidates are averages of r x r of them."""
        ...
