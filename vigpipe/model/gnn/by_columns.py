"""Evaluate a graph model too large for any rank: each of m ranks has a block of the channels."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe import ops
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.gnn.edges import Edges
from vigpipe.model.gnn.features import AnyFeatures, dense, first_rows
from vigpipe.model.gnn.gat import SLOPE, GatLayer, Gatv2Layer, columns_of_heads
from vigpipe.model.gnn.gcn import GcnLayer
from vigpipe.model.gnn.gcn2 import ALPHA, Gcn2Layer
from vigpipe.model.gnn.gin import GinLayer
from vigpipe.model.gnn.layer import GraphLayer
from vigpipe.model.gnn.model import Gcn2Model, GraphModel
from vigpipe.model.gnn.sage import NarrowingSageLayer, SageLayer
from vigpipe.model.norm import BatchNorm
from vigpipe.ops.adjacency import Adjacency, Layered


class ByColumns:
    """A wide graph model, or a stage of it, of which every rank has a share (`model.gnn.columns`).

    All m ranks of a stage call `forward` at the same time with the same nodes. Results equal those
    of the wide model in evaluation mode up to rounding. The tensors of `model` are not used, and
    may be on meta: `share` has the rank's.
    """

    def __init__(self, model: GraphModel, share: WideShare) -> None:
        self.model, self._share = model, share
        self._stats: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def forward(
        self,
        x: AnyFeatures,
        adjacency: Adjacency | Layered,
        features: AnyFeatures | None = None,
        *,
        estimate: bool = False,
    ) -> Tensor:
        """Evaluate what is present on the nodes of a batch, as `GraphModel.forward` does.

        Between stages, x and the result are the rank's columns, (n, d / m); with GCNII, those of
        the features and of the first features, side by side. Logits have the same bits on all
        ranks. `features` are those of `GraphModel.by_layer`. With `estimate`, every BatchNorm
        normalises with the statistics of these nodes, and records them for `take_stats`.
        """
        model = self.model
        x = x if features is None else features
        if not adjacency.suits(len(x), model.span[0], model.num_layers):
            raise ValueError(f"a graph model needs the edges of its {len(x)} nodes in every layer")
        if model.has_stem and isinstance(model, Gcn2Model):
            first = self._share.linear(x, "stem").relu()
            x = torch.cat((first, first), 1)
        for name, layer in model.convs.items():
            layer = cast(GraphLayer, layer)
            edges = Edges(adjacency.of_layer(int(name)), fused=layer.fused)
            x = self._run(name, layer, first_rows(x, edges.num_sources), edges, estimate)
        if not model.has_readout:
            return x
        x = first_rows(x, adjacency.num_targets)
        return self._share.linear(_halves(x)[0], "readout") if isinstance(model, Gcn2Model) else x

    def take_stats(self) -> dict[str, Tensor]:
        """Return each BatchNorm's statistics since the last call, (batches, 3, C) float64."""
        stats = {name: torch.stack(batches) for name, batches in self._stats.items()}
        self._stats = {}
        return stats

    def _run(
        self, name: str, layer: GraphLayer, x: AnyFeatures, edges: Edges, estimate: bool
    ) -> Tensor:
        prefix = f"{self.model.blocks_name}.{name}."
        y = _LAYERS[type(layer)](self._share.of(prefix), layer, x, edges)
        y = self._normalised(f"{prefix}norm", layer.norm, y, estimate)
        y = y if layer.activation is None else layer.activation(y)
        if isinstance(layer, Gcn2Layer):
            return torch.cat((y, edges.own(_halves(x)[1])), 1)
        return y

    def _normalised(self, name: str, norm: nn.Module, y: Tensor, estimate: bool) -> Tensor:
        share = self._share.of(f"{name}.")
        if isinstance(norm, nn.LayerNorm):
            return share.layer_norm(y, norm.eps)
        if not isinstance(norm, BatchNorm):
            return y
        weight, bias = (share.tensor(key, y.device) for key in ("weight", "bias"))
        if not estimate:
            running_mean = share.tensor("running_mean", y.device)
            running_var = share.tensor("running_var", y.device)
            return F.batch_norm(y, running_mean, running_var, weight, bias, eps=norm.eps)
        y, means, variances = ops.norm(y, weight, bias, eps=norm.eps, fused=norm.fused)
        stats = torch.stack((torch.full_like(means, len(y)), means, variances * len(y)))
        self._stats.setdefault(name, []).append(stats)
        return y


def _gcn(share: WideShare, layer: GcnLayer, x: AnyFeatures, edges: Edges) -> Tensor:
    (sent,) = share.products(x, "lin.weight")
    return edges.with_loops().sums(sent, "gcn", share.tensor("bias", sent.device))


def _sage(share: WideShare, layer: SageLayer, x: AnyFeatures, edges: Edges) -> Tensor:
    """Multiply before taking the mean, so that it has only the rank's channels."""
    bias = share.tensor("lin_l.bias", x.device)
    if layer.aggregator == "mean":
        sent, kept = share.products(x, "lin_l.weight", "lin_r.weight")
        return edges.sums(sent, "mean", edges.own(kept) + bias)
    if layer.aggregator == "pool":
        projected, kept = share.products(x, "lin.weight", "lin_r.weight")
        sent = (projected + share.tensor("lin.bias", x.device)).relu()
    else:
        sent, (kept,) = dense(x, share.chunk), share.products(x, "lin_r.weight")
    (received,) = share.products(edges.maximum(sent), "lin_l.weight")
    return received + bias + edges.own(kept)


def _gin(share: WideShare, layer: GinLayer, x: AnyFeatures, edges: Edges) -> Tensor:
    (sent,) = share.products(x, "nn.lins.0.weight")
    total = edges.sums(sent, "ones", (1 + share.tensor("eps", x.device)) * edges.own(sent))
    hidden = (total + share.tensor("nn.lins.0.bias", x.device)).relu()
    return share.linear(hidden, "nn.lins.1")


def _gat(share: WideShare, layer: GatLayer, x: AnyFeatures, edges: Edges) -> Tensor:
    """Score with what the rank has of each head; the sum over the ranks is the score."""
    edges = edges.with_loops()
    (sent,) = share.products(x, "lin.weight")
    weights = [share.tensor(name, x.device)[0] for name in ("att_src", "att_dst")]
    ends = share.summed("att_src", sent @ torch.cat([columns_of_heads(w) for w in weights], 1))
    of_sources, of_targets = _halves(ends)
    shares = edges.pair_softmax(of_sources, edges.own(of_targets), SLOPE)
    return edges.attention_sum(shares, sent) + share.tensor("bias", x.device)


def _gatv2(share: WideShare, layer: Gatv2Layer, x: AnyFeatures, edges: Edges) -> Tensor:
    """Score with what the rank has of each head; the sum over the ranks is the score."""
    edges = edges.with_loops()
    left, right = share.products(x, "lin_l.weight", "lin_r.weight")
    left = left + share.tensor("lin_l.bias", x.device)
    right = edges.own(right) + share.tensor("lin_r.bias", x.device)
    scores = edges.pair_scores(left, right, share.tensor("att", x.device)[0], SLOPE)
    shares = edges.edge_softmax(share.summed("att", scores))
    return edges.attention_sum(shares, left) + share.tensor("bias", x.device)


def _gcn2(share: WideShare, layer: Gcn2Layer, x: Tensor, edges: Edges) -> Tensor:
    h, first = _halves(x)
    z = (1 - ALPHA) * edges.with_loops().sums(h, "gcn") + ALPHA * edges.own(first)
    return (1 - layer.beta) * z + layer.beta * share.product_of_inputs(z, "weight1")


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=1)
    return first, second


# Each function makes the rank's columns of a layer's output, before norm and activation, from its
# columns of the input; the logits and the graph's features are whole.
_LAYERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    GcnLayer: _gcn,
    SageLayer: _sage,
    NarrowingSageLayer: _sage,
    GinLayer: _gin,
    GatLayer: _gat,
    Gatv2Layer: _gatv2,
    Gcn2Layer: _gcn2,
}
