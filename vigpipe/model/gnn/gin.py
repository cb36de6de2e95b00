"""Graph isomorphism network, Xu, Hu, Leskovec, Jegelka 2019 (arXiv:1810.00826)."""

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.layer import GraphLayer, Setting
from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.sparse import weighted_sum


class GinLayer(GraphLayer):
    """Compute MLP((1 + eps) x_i + sum of x_j), equation 4.1, as torch-geometric's GINConv does.

    The MLP is two linear layers with ReLU between them, and eps is trained from 0 on.

    Args:
        in_channels: C.
        out_channels: C'.
        setting: place, dropout, norm and activation of the layer.
    """

    def __init__(self, in_channels: int, out_channels: int, setting: Setting) -> None:
        super().__init__(setting)
        self.eps = nn.Parameter(torch.zeros(1))
        linears = (nn.Linear(in_channels, out_channels), nn.Linear(out_channels, out_channels))
        self.nn = nn.ModuleDict({"lins": nn.ModuleList(linears)})

    def aggregate(
        self, messages: Tensor, own: Tensor, adjacency: Adjacency, keys: Tensor | None
    ) -> Tensor:
        """Sum what the edges bring: (m, C)."""
        return weighted_sum(adjacency, messages)

    def update(self, total: Tensor, own: Tensor) -> Tensor:
        """Add the node itself and run the MLP: (m, C), (m, C) -> (m, C')."""
        first, second = self.nn["lins"].children()
        return second(first(total + (1 + self.eps) * own).relu())
