"""Graph isomorphism network, Xu, Hu, Leskovec, Jegelka 2019 (arXiv:1810.00826)."""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.edges import Added, Edges
from vigpipe.model.gnn.features import AnyFeatures
from vigpipe.model.gnn.layer import GraphLayer, Setting
from vigpipe.model.slicing import Roles, Side
from vigpipe.ops.sparse_rows import linear


class GinLayer(GraphLayer):
    """Compute MLP((1 + eps) x_i + sum of x_j), equation 4.1, as torch-geometric's GINConv does."""

    roles: ClassVar[Roles] = {
        "eps": (None,),
        "nn.lins.0.weight": ("hidden", "in"),
        "nn.lins.0.bias": ("hidden",),
        "nn.lins.1.weight": ("out", "hidden"),
        "nn.lins.1.bias": ("out",),
    }
    joins = True

    def __init__(self, in_channels: int, out_channels: int, setting: Setting) -> None:
        super().__init__(setting)
        self.eps = nn.Parameter(torch.zeros(1))
        self.narrows = in_channels >= out_channels
        linears = (nn.Linear(in_channels, out_channels), nn.Linear(out_channels, out_channels))
        self.nn = nn.ModuleDict({"lins": nn.ModuleList(linears)})

    def messages(self, x: AnyFeatures) -> Tensor:
        first, _ = self._linears
        return linear(x, first.weight, fused=self.fused) if self.multiplies_first(x) else x

    def aggregate(
        self, messages: Tensor, own: AnyFeatures, edges: Edges, keys: Tensor | None
    ) -> Tensor:
        itself = (1 + self.eps) * edges.own(messages)
        return edges.sums(messages, "ones", itself)

    def update(self, total: Tensor, own: AnyFeatures) -> Tensor:
        first, second = self._linears
        hidden = total + first.bias if self.multiplies_first(own) else first(total)
        return second(hidden.relu())

    def joined(self, x: AnyFeatures, own: AnyFeatures, edges: Edges) -> Tensor:
        first, second = self._linears
        added = Added(first.bias, itself=1 + self.eps)
        if self.multiplies_first(x):
            hidden = edges.product_then_sums(x, first.weight, "ones", added)
        else:
            hidden = edges.sums_then_product(x, "ones", first.weight, added)
        return second(hidden.relu())

    def hidden(self, group: str, before: Side | None, after: Side | None) -> Side | None:
        """Return a side of the layer's own group, unless the hidden layer has the logits' width."""
        return None if after is None else Side(group)

    @property
    def _linears(self) -> tuple[nn.Linear, nn.Linear]:
        return cast(tuple[nn.Linear, nn.Linear], tuple(self.nn["lins"].children()))
