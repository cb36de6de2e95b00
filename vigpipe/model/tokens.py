"""What a ViG asks of the nodes of an image that other ranks have.

Where several ranks share every image, each has some rows of the grid of nodes, (B, H_k, W, C) of
(B, H, W, C), and computes what takes a node alone. Whatever crosses nodes goes through `Tokens`,
which the modules have as an attribute; it is None where a process has whole images, and then
nothing is asked. `vigpipe.data.tokens` has the other side: models know nothing of ranks.
"""

from typing import Protocol

from torch import Tensor, nn

from vigpipe.model.position import Grid


class SharedNodes(Protocol):
    """The nodes that a block makes a graph of, and averages of them where neighbours are pooled."""

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
        """Index the k nearest neighbours of all nodes; see `vigpipe.model.graph.knn_graph`.

        Args:
            x: features of the rank's nodes, (B, n_k, C).
            k: neighbours per node.
            dilation: keep every dilation-th of the k * dilation nearest.
            bias: added to squared distances of all nodes, (1, N, M).
            ranks: which of the k * dilation nearest to keep, (B, K) int64; None for `dilation`.
            fused: use the fused operator where there is one.

        Returns:
            (B, N, K) int64, of all nodes, on every rank.
        """
        ...

    def reduced(self, x: Tensor, graph: Tensor, mode: str, *, fused: bool) -> Tensor:
        """Reduce the neighbours of the rank's nodes; see `vigpipe.ops.aggregate`.

        Args:
            x: features of the rank's nodes, (B, n_k, C).
            graph: of all nodes, (B, N, K) int64.
            mode: `max`, `max_mean` or `sum`.
            fused: use the fused operator where there is one.

        Returns:
            (B, n_k, C * outputs), with the outputs of a channel side by side.
        """
        ...

    def neighbours(self, x: Tensor, graph: Tensor) -> Tensor:
        """Gather the features of the neighbours of the rank's nodes.

        Args:
            x: features of the rank's nodes, (B, n_k, C).
            graph: of all nodes, (B, N, K) int64.

        Returns:
            (B, n_k, K, C).
        """
        ...


class Tokens(Protocol):
    """The rows that a rank has of images, and what takes rows of others."""

    def own(self, x: Tensor) -> Tensor:
        """Return the rank's rows of what every rank has: (B, H, W, C) -> (B, H_k, W, C)."""
        ...

    def whole(self, x: Tensor, grid: Grid) -> Tensor:
        """Give every rank the rows of all: (B, H_k, W, C) -> (B, H, W, C)."""
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
