"""GraphSAGE, Hamilton, Ying, Leskovec 2017 (arXiv:1706.02216)."""

from torch import Tensor, nn

from vigpipe.model.gnn.layer import GraphLayer, Setting
from vigpipe.ops import sparse
from vigpipe.ops.adjacency import Adjacency


class SageLayer(GraphLayer):
    """Compute W_l aggregate(x_j) + b + W_r x_i, as torch-geometric's SAGEConv does.

    The aggregators are the mean, the maximum, and the maximum of relu(W x_j + b), equation 3
    (`pool`, SAGEConv with `project=True`).

    Args:
        in_channels: C.
        out_channels: C'.
        setting: place, dropout, norm and activation of the layer.
        aggregator: mean, max or pool.
    """

    def __init__(
        self, in_channels: int, out_channels: int, setting: Setting, aggregator: str = "mean"
    ) -> None:
        super().__init__(setting)
        self.aggregator = aggregator
        if aggregator == "pool":
            self.lin = nn.Linear(in_channels, in_channels)
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def messages(self, x: Tensor) -> Tensor:
        """Return what nodes send: (n, C) -> (n, C)."""
        return self.lin(x).relu() if self.aggregator == "pool" else x

    def aggregate(
        self, messages: Tensor, own: Tensor, adjacency: Adjacency, keys: Tensor | None
    ) -> Tensor:
        """Take the mean or the maximum of what the edges bring: (m, C)."""
        reduce = sparse.mean if self.aggregator == "mean" else sparse.maximum
        return reduce(adjacency, messages)

    def update(self, total: Tensor, own: Tensor) -> Tensor:
        """Combine neighbours and the node itself: (m, C), (m, C) -> (m, C')."""
        return self.lin_l(total) + self.lin_r(own)
