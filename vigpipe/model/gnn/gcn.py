"""Graph convolution, Kipf & Welling 2017 (arXiv:1609.02907)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.edges import Edges
from vigpipe.model.gnn.layer import Features, GraphLayer, Setting, glorot_linear
from vigpipe.model.slicing import Roles
from vigpipe.ops.sparse_rows import linear


class GcnLayer(GraphLayer):
    """Compute D^-1/2 (A + I) D^-1/2 X W + b, equation 2, as torch-geometric's GCNConv does.

    Args:
        in_channels: C.
        out_channels: C'.
        setting: place, dropout, norm and activation of the layer.
    """

    roles: ClassVar[Roles] = {"lin.weight": ("out", "in"), "bias": ("out",)}

    def __init__(self, in_channels: int, out_channels: int, setting: Setting) -> None:
        super().__init__(setting)
        self.lin = glorot_linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def messages(self, x: Features) -> Tensor:
        """Return what nodes send: (n, C) -> (n, C')."""
        return linear(x, self.lin.weight, fused=self.fused)

    def aggregate(
        self, messages: Tensor, own: Features, edges: Edges, keys: Tensor | None
    ) -> Tensor:
        """Sum what edges and a self-loop bring, with normalised weights, and a bias: (m, C')."""
        return edges.with_loops().sums(messages, "gcn", self.bias)

    def update(self, total: Tensor, own: Features) -> Tensor:
        """Return the sum as it is: (m, C') -> (m, C')."""
        return total
