"""GraphSAGE, Hamilton, Ying, Leskovec 2017 (arXiv:1706.02216)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.edges import Added, Edges
from vigpipe.model.gnn.features import AnyFeatures
from vigpipe.model.gnn.layer import GraphLayer, Setting
from vigpipe.model.slicing import Roles, Side
from vigpipe.ops.sparse_rows import SparseRows, linear


class SageLayer(GraphLayer):
    """Compute W_l aggregate(x_j) + b + W_r x_i, as torch-geometric's SAGEConv does.

    The aggregators are mean, max, and `pool`: the maximum of relu(W x_j + b), equation 3.
    """

    roles: ClassVar[Roles] = {
        "lin.weight": ("hidden", "in"),
        "lin.bias": ("hidden",),
        "lin_l.weight": ("out", "hidden"),
        "lin_l.bias": ("out",),
        "lin_r.weight": ("out", "in"),
    }

    def __init__(
        self, in_channels: int, out_channels: int, setting: Setting, aggregator: str = "mean"
    ) -> None:
        super().__init__(setting)
        self.aggregator, self.joins = aggregator, aggregator == "mean"
        if aggregator == "pool":
            self.lin = nn.Linear(in_channels, in_channels)
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def messages(self, x: AnyFeatures) -> Tensor:
        if self.aggregator == "pool":
            return linear(x, self.lin.weight, self.lin.bias, fused=self.fused).relu()
        return x.dense() if isinstance(x, SparseRows) else x

    def aggregate(
        self, messages: Tensor, own: AnyFeatures, edges: Edges, keys: Tensor | None
    ) -> Tensor:
        if self.aggregator == "mean":
            return edges.sums(messages, "mean")
        return edges.maximum(messages)

    def update(self, total: Tensor, own: AnyFeatures) -> Tensor:
        return linear(own, self.lin_r.weight, self.lin_l(total), fused=self.fused)

    def joined(self, x: AnyFeatures, own: AnyFeatures, edges: Edges) -> Tensor:
        added = Added(self.lin_l.bias, beside=(own, self.lin_r.weight))
        return edges.sums_then_product(self.messages(x), "mean", self.lin_l.weight, added)

    def hidden(self, group: str, before: Side | None, after: Side | None) -> Side | None:
        """Return the side of what is aggregated: the input's, or that of a group if projected."""
        return before if before is None or self.aggregator != "pool" else Side(group)


class NarrowingSageLayer(SageLayer):
    """A SAGE layer that multiplies by W_l before it takes the mean; it pays if C' is at most C.

    Features that need a gradient are multiplied by W_l and W_r at once, and their gradient is
    one product, too. Those of the graph need none, and two products take less memory.
    """

    def __init__(self, in_channels: int, out_channels: int, setting: Setting) -> None:
        super().__init__(in_channels, out_channels, setting)
        self.is_joint = setting.index > 0

    def messages(self, x: AnyFeatures) -> Tensor:
        """Return W_l x, (n, C'); if both products are taken at once, W_r x + b beside it."""
        if not self.is_joint:
            return linear(x, self.lin_l.weight, fused=self.fused)
        bias = torch.cat((torch.zeros_like(self.lin_l.bias), self.lin_l.bias))
        return linear(x, torch.cat((self.lin_l.weight, self.lin_r.weight)), bias)  # (n, 2 C')

    def aggregate(
        self, messages: Tensor, own: AnyFeatures, edges: Edges, keys: Tensor | None
    ) -> Tensor:
        if self.is_joint:
            return edges.own_and_mean(messages)
        return edges.sums(messages, "mean", self.lin_l.bias)

    def update(self, total: Tensor, own: AnyFeatures) -> Tensor:
        if self.is_joint:
            return total
        return linear(own, self.lin_r.weight, total, fused=self.fused)

    def joined(self, x: AnyFeatures, own: AnyFeatures, edges: Edges) -> Tensor:
        added = Added(self.lin_l.bias, beside=(own, self.lin_r.weight))
        return edges.product_then_sums(x, self.lin_l.weight, "mean", added)
