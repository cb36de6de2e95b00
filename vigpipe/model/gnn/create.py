"""Make a graph model by its name."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from vigpipe.errors import InputError
from vigpipe.model.gnn.gat import GatLayer, Gatv2Layer
from vigpipe.model.gnn.gcn import GcnLayer
from vigpipe.model.gnn.gcn2 import Gcn2Layer
from vigpipe.model.gnn.gin import GinLayer
from vigpipe.model.gnn.layer import GraphLayer
from vigpipe.model.gnn.model import Gcn2Model, GraphModel
from vigpipe.model.gnn.sage import SageAggregator, SageLayer
from vigpipe.model.norm import make_norm

GraphModelName = Literal["gcn", "sage", "gat", "gatv2", "gin", "gcn2"]
GraphNorm = Literal["none", "batch", "layer"]

GRAPH_MODELS: tuple[str, ...] = get_args(GraphModelName)
GRAPH_NORMS: tuple[str, ...] = get_args(GraphNorm)
SAGE_AGGREGATORS: tuple[str, ...] = get_args(SageAggregator)
_ATTENTION = {"gat": GatLayer, "gatv2": Gatv2Layer}
_DROPS_FEATURES = ("gcn", "gat", "gatv2", "gcn2")  # as published, the graph's features too


def create_graph_model(
    name: GraphModelName,
    *,
    in_channels: int,
    num_classes: int,
    num_layers: int,
    width: int,
    heads: int = 1,
    dropout: float = 0.0,
    aggregator: SageAggregator | None = None,
    norm: GraphNorm = "none",
) -> GraphModel:
    """Make a model; its initial weights are drawn from torch's own generator.

    Args:
        name: gcn, sage, gat, gatv2, gin or gcn2.
        in_channels: channels of the graph's features.
        num_classes: number of logits.
        num_layers: number of layers, which are the blocks of the model.
        width: channels between layers, those of all heads together.
        heads: attention heads of gat and gatv2, which the width is divided among; the last layer
            has one.
        dropout: dropout rate before every layer, and of attention coefficients. Before the first
            layer of sage and gin there is none.
        aggregator: mean, max or pool, of sage; by default mean.
        norm: norm after each layer but that which gives the logits: none, batch or layer.

    Raises:
        InputError: there is no such model, or it has no such choice.
    """
    _check(name, num_layers, width, heads, dropout, aggregator, norm)

    def make_layer(i: int) -> GraphLayer:
        inner = nn.Identity() if norm == "none" else make_norm(norm, width)
        if name == "gcn2":
            return Gcn2Layer(width, i, dropout, inner)
        is_last = i == num_layers - 1
        channels = (in_channels if i == 0 else width, num_classes if is_last else width)
        rate = dropout if i or name in _DROPS_FEATURES else 0.0
        activation = F.elu if name in _ATTENTION else torch.relu
        rest = (i, rate, nn.Identity(), None) if is_last else (i, rate, inner, activation)
        if name in _ATTENTION:
            return _ATTENTION[name](*channels, *rest, 1 if is_last else heads)
        if name == "sage":
            return SageLayer(*channels, *rest, aggregator or "mean")
        return (GcnLayer if name == "gcn" else GinLayer)(*channels, *rest)

    layers = [make_layer(i) for i in range(num_layers)]
    if name == "gcn2":
        return Gcn2Model(in_channels, width, num_classes, layers, dropout)
    return GraphModel(in_channels, width, num_classes, layers)


def _check(
    name: str,
    num_layers: int,
    width: int,
    heads: int,
    dropout: float,
    aggregator: str | None,
    norm: str,
) -> None:
    if name not in GRAPH_MODELS:
        raise InputError(f"--model {name}: no such model; choose one of {', '.join(GRAPH_MODELS)}")
    if num_layers < 1:
        raise InputError(f"--layers {num_layers}: a model has at least 1 layer")
    if heads < 1 or (heads > 1 and name not in _ATTENTION):
        raise InputError(f"--heads {heads}: gat and gatv2 have 1 or more, other models have 1")
    if width < 1 or width % heads:
        raise InputError(
            f"--width {width} with --heads {heads}: the width is divided among the heads, so take "
            f"a multiple of {heads}"
        )
    if not 0 <= dropout < 1:
        raise InputError(f"--dropout {dropout}: the rate is from 0 to less than 1")
    if norm not in GRAPH_NORMS:
        raise InputError(f"--norm {norm}: {name} has {', '.join(GRAPH_NORMS)}")
    if aggregator is not None and (name != "sage" or aggregator not in SAGE_AGGREGATORS):
        raise InputError(
            f"--aggregator {aggregator}: sage has {', '.join(SAGE_AGGREGATORS)}, and other models "
            "have no choice"
        )
