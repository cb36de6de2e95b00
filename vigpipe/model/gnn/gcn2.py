"""GCNII, Chen, Wei, Huang, Ding, Li 2020 (arXiv:2007.02133)."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.edges import Edges
from vigpipe.model.gnn.features import AnyFeatures
from vigpipe.model.gnn.layer import GraphLayer, Setting, glorot
from vigpipe.model.keyed_dropout import Draws
from vigpipe.model.slicing import Roles

ALPHA, THETA = 0.1, 0.5  # a, and the 0.5 in b, as in the paper


class Gcn2Layer(GraphLayer):
    """Compute z ((1 - b) I + b W) with z = (1 - a) P h + a h_0, equation 5.

    P = D^-1/2 (A + I) D^-1/2, a = 0.1, b = log(0.5 / l + 1) in layer l = 1, 2, ... As
    torch-geometric's GCN2Conv with shared weights. The first features h_0 pass through the layer
    unchanged: its input and output have h and h_0 side by side, of C channels each. Dropout is
    that of h.
    """

    roles: ClassVar[Roles] = {"weight1": ("in", "out")}

    def __init__(self, width: int, setting: Setting) -> None:
        super().__init__(setting)
        self.width, self.beta = width, math.log(THETA / (setting.index + 1) + 1)
        self.weight1 = nn.Parameter(glorot(torch.empty(width, width)))

    def dropped(self, x: AnyFeatures, draws: Draws | None) -> AnyFeatures:
        if not self.dropout.is_on:
            return x
        h, first = x.split(self.width, dim=1)
        return torch.cat((self.dropout(h, draws), first), dim=1)

    def messages(self, x: AnyFeatures) -> Tensor:
        return x[:, : self.width]

    def aggregate(
        self, messages: Tensor, own: AnyFeatures, edges: Edges, keys: Tensor | None
    ) -> Tensor:
        return edges.with_loops().sums(messages, "gcn")

    def update(self, total: Tensor, own: AnyFeatures) -> Tensor:
        z = (1 - ALPHA) * total + ALPHA * own[:, self.width :]
        return torch.addmm(z, z, self.weight1, beta=1 - self.beta, alpha=self.beta)

    def _finished(self, total: Tensor, own: AnyFeatures, edges: Edges) -> Tensor:
        return torch.cat((super()._finished(total, own, edges), own[:, self.width :]), dim=1)
