"""Graph attention, Veličković et al. 2018 (arXiv:1710.10903) and Brody et al. 2022.

Brody, Alon, Yahav 2022, "How Attentive are Graph Attention Networks?", is arXiv:2105.14491.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe.model.gnn.layer import GraphLayer, Setting, glorot, glorot_linear
from vigpipe.model.keyed_dropout import ChannelDropout, pair_keys
from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.sparse import attention_sum, edge_softmax, from_sources, from_targets

SLOPE = 0.2  # of the leaky ReLU, in both papers


class AttentionLayer(GraphLayer):
    """What both versions of graph attention have in common: softmax, dropout, weighted sum.

    A node also attends to itself, and so has a self-loop. The heads' results are side by side.

    Args:
        out_channels: C', heads times the channels of a head.
        setting: place, dropout, norm and activation of the layer.
        heads: H.
    """

    def __init__(self, out_channels: int, setting: Setting, heads: int) -> None:
        super().__init__(setting)
        self.attention_dropout = ChannelDropout(setting.dropout, stream=2 * setting.index + 1)
        self.heads, self.head_channels = heads, out_channels // heads
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def by_heads(self, x: Tensor) -> Tensor:
        """Split channels into heads: (n, H * c) -> (n, H, c)."""
        return x.unflatten(-1, (self.heads, self.head_channels))

    def attend(
        self, scores: Tensor, values: Tensor, adjacency: Adjacency, keys: Tensor | None
    ) -> Tensor:
        """Sum values with the softmax of the scores.

        Args:
            scores: (e, H).
            values: (n, H, c).
            adjacency: edges from the n sources to m targets, self-loops included.
            keys: the nodes' keys, (n,); None in evaluation mode.

        Returns:
            (m, H * c).
        """
        shares = edge_softmax(adjacency, scores)
        if self.attention_dropout.is_on:
            assert keys is not None
            keys = keys.to(scores.device)
            edges = pair_keys(keys[adjacency.targets], keys[adjacency.indices])
            shares = self.attention_dropout.masked(shares, edges)
        return attention_sum(adjacency, shares, values).flatten(1)

    def update(self, total: Tensor, own: Tensor) -> Tensor:
        """Add the bias: (m, C') -> (m, C')."""
        return total + self.bias


class GatLayer(AttentionLayer):
    """Score an edge from j to i by leaky_relu(a_src W x_j + a_dst W x_i), equation 3.

    As torch-geometric's GATConv.

    Args:
        in_channels: C.
        out_channels: C', heads times the channels of a head.
        setting: place, dropout, norm and activation of the layer.
        heads: H.
    """

    def __init__(
        self, in_channels: int, out_channels: int, setting: Setting, heads: int = 1
    ) -> None:
        super().__init__(out_channels, setting, heads)
        self.lin = glorot_linear(in_channels, out_channels, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, self.head_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, self.head_channels))
        glorot(self.att_src)
        glorot(self.att_dst)

    def messages(self, x: Tensor) -> Tensor:
        """Return what nodes send: (n, C) -> (n, C')."""
        return self.lin(x)

    def aggregate(
        self, messages: Tensor, own: Tensor, adjacency: Adjacency, keys: Tensor | None
    ) -> Tensor:
        """Sum what the edges bring, with weights by attention: (m, C')."""
        adjacency = adjacency.with_loops()
        values = self.by_heads(messages)  # (n, H, c)
        of_sources = (values * self.att_src).sum(-1)  # (n, H)
        of_targets = (adjacency.own(values) * self.att_dst).sum(-1)  # (m, H)
        scores = from_sources(adjacency, of_sources) + from_targets(adjacency, of_targets)
        return self.attend(F.leaky_relu(scores, SLOPE), values, adjacency, keys)


class Gatv2Layer(AttentionLayer):
    """Score an edge from j to i by a leaky_relu(W_l x_j + W_r x_i), equation 7 of Brody et al.

    As torch-geometric's GATv2Conv.

    Args:
        in_channels: C.
        out_channels: C', heads times the channels of a head.
        setting: place, dropout, norm and activation of the layer.
        heads: H.
    """

    def __init__(
        self, in_channels: int, out_channels: int, setting: Setting, heads: int = 1
    ) -> None:
        super().__init__(out_channels, setting, heads)
        self.lin_l = glorot_linear(in_channels, out_channels, bias=True)
        self.lin_r = glorot_linear(in_channels, out_channels, bias=True)
        self.att = nn.Parameter(torch.empty(1, heads, self.head_channels))
        glorot(self.att)

    def messages(self, x: Tensor) -> Tensor:
        """Return what nodes send: (n, C) -> (n, C')."""
        return self.lin_l(x)

    def aggregate(
        self, messages: Tensor, own: Tensor, adjacency: Adjacency, keys: Tensor | None
    ) -> Tensor:
        """Sum what the edges bring, with weights by attention: (m, C')."""
        adjacency = adjacency.with_loops()
        brought = from_sources(adjacency, messages) + from_targets(adjacency, self.lin_r(own))
        scores = (self.by_heads(F.leaky_relu(brought, SLOPE)) * self.att).sum(-1)  # (e, H)
        return self.attend(scores, self.by_heads(messages), adjacency, keys)
