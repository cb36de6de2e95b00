"""Graph attention: Veličković et al. (arXiv:1710.10903) and Brody et al. (arXiv:2105.14491)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.edges import Edges
from vigpipe.model.gnn.features import AnyFeatures
from vigpipe.model.gnn.layer import GraphLayer, Setting, glorot, glorot_linear
from vigpipe.model.keyed_dropout import ChannelDropout
from vigpipe.model.slicing import Roles
from vigpipe.ops.sparse_rows import linear

SLOPE = 0.2  # slope of the leaky ReLU below 0, in both papers


class AttentionLayer(GraphLayer):
    """The common part of both versions of graph attention: softmax, dropout, weighted sum.

    Nodes also attend to themselves. The results of the H heads are side by side in the C' channels.
    """

    def __init__(self, out_channels: int, setting: Setting) -> None:
        super().__init__(setting)
        self.attention_dropout = ChannelDropout(setting.dropout, stream=2 * setting.index + 1)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def aggregate(
        self, messages: Tensor, own: AnyFeatures, edges: Edges, keys: Tensor | None
    ) -> Tensor:
        edges = edges.with_loops()
        shares = self.shares(messages, own, edges)
        if self.attention_dropout.is_on:
            assert keys is not None
            edge_keys = edges.pair_keys(keys.to(shares.device))
            shares = self.attention_dropout.masked(shares, edge_keys)
        return edges.attention_sum(shares, messages)

    def shares(self, messages: Tensor, own: AnyFeatures, edges: Edges) -> Tensor:
        """Return the softmax of the scores of the edges that end in a node, (e, H)."""
        raise NotImplementedError

    def update(self, total: Tensor, own: AnyFeatures) -> Tensor:
        return total + self.bias


class GatLayer(AttentionLayer):
    """Score j to i by leaky_relu(a_src W x_j + a_dst W x_i), equation 3; PyG's GATConv."""

    roles: ClassVar[Roles] = {
        "lin.weight": ("out", "in"),
        "att_src": (None, None, "head"),
        "att_dst": (None, None, "head"),
        "bias": ("out",),
    }

    def __init__(self, in_channels: int, out_channels: int, setting: Setting, heads: int) -> None:
        super().__init__(out_channels, setting)
        self.lin = glorot_linear(in_channels, out_channels, bias=False)
        self.att_src = nn.Parameter(glorot(torch.empty(1, heads, out_channels // heads)))
        self.att_dst = nn.Parameter(glorot(torch.empty(1, heads, out_channels // heads)))

    def messages(self, x: AnyFeatures) -> Tensor:
        return linear(x, self.lin.weight, fused=self.fused)

    def shares(self, messages: Tensor, own: AnyFeatures, edges: Edges) -> Tensor:
        weights = [columns_of_heads(att[0]) for att in (self.att_src, self.att_dst)]
        ends = messages @ torch.cat(weights, 1)
        of_sources, of_targets = ends.chunk(2, dim=1)  # (n, H) each
        return edges.pair_softmax(of_sources, edges.own(of_targets), SLOPE)


def columns_of_heads(weights: Tensor) -> Tensor:
    """Make the matrix that multiplies each head's channels by its weights: (H, c) -> (H * c, H)."""
    return torch.diag_embed(weights.T).permute(1, 0, 2).flatten(0, 1)


class Gatv2Layer(AttentionLayer):
    """Score j to i by a leaky_relu(W_l x_j + W_r x_i), equation 7 of Brody; PyG's GATv2Conv."""

    roles: ClassVar[Roles] = {
        "lin_l.weight": ("out", "in"),
        "lin_l.bias": ("out",),
        "lin_r.weight": ("out", "in"),
        "lin_r.bias": ("out",),
        "att": (None, None, "head"),
        "bias": ("out",),
    }

    def __init__(self, in_channels: int, out_channels: int, setting: Setting, heads: int) -> None:
        super().__init__(out_channels, setting)
        self.lin_l = glorot_linear(in_channels, out_channels, bias=True)
        self.lin_r = glorot_linear(in_channels, out_channels, bias=True)
        self.att = nn.Parameter(glorot(torch.empty(1, heads, out_channels // heads)))

    def messages(self, x: AnyFeatures) -> Tensor:
        return linear(x, self.lin_l.weight, self.lin_l.bias, fused=self.fused)

    def shares(self, messages: Tensor, own: AnyFeatures, edges: Edges) -> Tensor:
        right = linear(own, self.lin_r.weight, self.lin_r.bias, fused=self.fused)
        return edges.edge_softmax(edges.pair_scores(messages, right, self.att[0], SLOPE))
