"""The base class of the layers: dropout, aggregation, update, norm and activation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.edges import Edges
from vigpipe.model.gnn.features import AnyFeatures, first_rows
from vigpipe.model.keyed_dropout import ChannelDropout, Draws
from vigpipe.model.norm import NORM_ROLES
from vigpipe.model.regions import region
from vigpipe.model.slicing import Roles, Side, Sides, bound
from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.masked import relu
from vigpipe.ops.sparse_rows import SparseRows


@dataclass(frozen=True)
class Setting:
    """The arguments that every kind of layer takes."""

    index: int  # of the layer, counted from 0; its random masks depend on it
    dropout: float  # rate of the layer's input, and of attention coefficients
    norm: nn.Module  # after the update
    activation: Callable[[Tensor], Tensor] | None  # after the norm


class Relu(nn.Module):
    """ReLU of a tensor that nothing else needs; see `ops.masked.relu`."""

    fused = True

    def forward(self, x: Tensor) -> Tensor:
        return relu(x, fused=self.fused)


class GraphLayer(nn.Module):
    """One layer of a graph model, which is a block of the staged model.

    Every node sends a message, which follows from its features alone; a node aggregates the
    messages that its edges bring, and the update makes its new features.
    """

    fused = True
    # The channels of the layer's own tensors: those that come `in`, go `out`, or belong to a `head`
    # or a `hidden` layer.
    roles: ClassVar[Roles] = {}
    narrows = False  # the layer multiplies first, as sums of the products have fewer channels
    joins = False  # the layer has a sum and a product that `joined` can ask for together

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.norm, self.activation = setting.norm, setting.activation
        self.dropout = ChannelDropout(setting.dropout, stream=2 * setting.index)

    def forward(self, x: AnyFeatures, draws: Draws | None, adjacency: Adjacency | Edges) -> Tensor:
        """Run the layer: (n, C) -> (m, C'), for the first m nodes, in which the edges end.

        The draws are None in evaluation mode. `Edges` stand for the adjacency where several ranks
        share a graph.
        """
        x, edges = self.dropped(x, draws), self._edges(adjacency)
        keys = None if draws is None else draws.keys
        own = first_rows(x, edges.num_targets)
        if edges.overlaps and self.joins:
            y = region("aggregation", self.joined, x, own, edges)
            return region("update", self._ended, y, edges)
        # No variable holds the messages, so that their memory is free while the update runs.
        total = region("aggregation", self.aggregate, self.messages(x), own, edges, keys)
        return region("update", self._finished, total, own, edges)

    def multiplies_first(self, x: AnyFeatures) -> bool:
        return isinstance(x, SparseRows) or self.narrows

    def sides(
        self, prefix: str, index: int, ends: tuple[Side | None, Side | None]
    ) -> dict[str, Sides]:
        """Return the sides of the layer's tensors, from those of its input and output, `ends`."""
        before, after = ends
        channels = {
            "in": before,
            "out": after,
            "head": None if after is None else Side(after.group),
            "hidden": self.hidden(f"hidden.{index}", before, after),
        }
        norm_sides = bound(self.norm, f"{prefix}norm.", NORM_ROLES, channels)
        return bound(self, prefix, self.roles, channels) | norm_sides

    def hidden(self, group: str, before: Side | None, after: Side | None) -> Side | None:
        """Return the side of hidden channels, maybe of the layer's own `group`; None if whole."""
        return None

    def received(self, messages: Tensor, own: AnyFeatures, adjacency: Adjacency) -> Tensor:
        """Aggregate messages, (n, M), and update the targets, (m, C), in evaluation mode."""
        edges = self._edges(adjacency)
        total = region("aggregation", self.aggregate, messages, own, edges, None)
        return region("update", self._finished, total, own, edges)

    def _edges(self, adjacency: Adjacency | Edges) -> Edges:
        return adjacency if isinstance(adjacency, Edges) else Edges(adjacency, fused=self.fused)

    def _finished(self, total: Tensor, own: AnyFeatures, edges: Edges) -> Tensor:
        return self._ended(self.update(total, own), edges)

    def _ended(self, y: Tensor, edges: Edges) -> Tensor:
        y = edges.normalised(self.norm, y)
        return y if self.activation is None else self.activation(y)

    def dropped(self, x: AnyFeatures, draws: Draws | None) -> AnyFeatures:
        """Apply dropout to the layer's input, (n, C)."""
        return self.dropout(x, draws)

    def messages(self, x: AnyFeatures) -> Tensor:
        """Return what nodes send: (n, C) -> (n, M)."""
        raise NotImplementedError

    def aggregate(
        self, messages: Tensor, own: AnyFeatures, edges: Edges, keys: Tensor | None
    ) -> Tensor:
        """Reduce messages to the targets, whose dropped features are `own`: (n, M) -> (m, A)."""
        raise NotImplementedError

    def joined(self, x: AnyFeatures, own: AnyFeatures, edges: Edges) -> Tensor:
        """Do what `messages`, `aggregate` and `update` do, with sum and product at once."""
        raise NotImplementedError

    def update(self, total: Tensor, own: AnyFeatures) -> Tensor:
        """Make new features, (m, C'), before norm and activation, of what `aggregate` returned."""
        raise NotImplementedError


@torch.no_grad()
def glorot(weight: Tensor) -> Tensor:
    """Draw weights, (..., a, b), from U(-r, r) with r = sqrt(6 / (a + b)), and return them.

    Glorot & Bengio 2010, equation 16, as torch-geometric applies it to tensors of any shape.
    """
    bound = math.sqrt(6.0 / (weight.shape[-2] + weight.shape[-1]))
    return weight.uniform_(-bound, bound)


def glorot_linear(in_channels: int, out_channels: int, bias: bool) -> nn.Linear:
    """Make a linear layer with such weights; its bias is drawn as torch does."""
    linear = nn.Linear(in_channels, out_channels, bias)
    glorot(linear.weight)
    return linear
