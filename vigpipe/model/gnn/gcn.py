"""Graph convolution, Kipf & Welling 2017 (arXiv:1609.02907)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.edges import Added, Edges
from vigpipe.model.gnn.features import AnyFeatures
from vigpipe.model.gnn.layer import GraphLayer, Setting, glorot_linear
from vigpipe.model.slicing import Roles
from vigpipe.ops.sparse_rows import linear


class GcnLayer(GraphLayer):
    """Compute D^-1/2 (A + I) D^-1/2 X W + b, equation 2, as torch-geometric's GCNConv does."""

    roles: ClassVar[Roles] = {"lin.weight": ("out", "in"), "bias": ("out",)}
    joins = True

    def __init__(self, in_channels: int, out_channels: int, setting: Setting) -> None:
        super().__init__(setting)
        self.narrows = in_channels >= out_channels
        self.lin = glorot_linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def messages(self, x: AnyFeatures) -> Tensor:
        return linear(x, self.lin.weight, fused=self.fused) if self.multiplies_first(x) else x

    def aggregate(
        self, messages: Tensor, own: AnyFeatures, edges: Edges, keys: Tensor | None
    ) -> Tensor:
        bias = self.bias if self.multiplies_first(own) else None
        return edges.with_loops().sums(messages, "gcn", bias)

    def update(self, total: Tensor, own: AnyFeatures) -> Tensor:
        return total if self.multiplies_first(own) else linear(total, self.lin.weight, self.bias)

    def joined(self, x: AnyFeatures, own: AnyFeatures, edges: Edges) -> Tensor:
        edges, weight, added = edges.with_loops(), self.lin.weight, Added(self.bias)
        if self.multiplies_first(x):
            return edges.product_then_sums(x, weight, "gcn", added)
        return edges.sums_then_product(x, "gcn", weight, added)
