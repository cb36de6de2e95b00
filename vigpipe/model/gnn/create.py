"""Make a graph model by its name."""

import torch.nn.functional as F
from torch import nn

from vigpipe.config.choices import GRAPH_AGGREGATORS, GnnModel, GraphNorm
from vigpipe.errors import InputError
from vigpipe.model.gnn.gat import GatLayer, Gatv2Layer
from vigpipe.model.gnn.gcn import GcnLayer
from vigpipe.model.gnn.gcn2 import Gcn2Layer
from vigpipe.model.gnn.gin import GinLayer
from vigpipe.model.gnn.layer import GraphLayer, Relu, Setting
from vigpipe.model.gnn.model import Gcn2Model, GraphModel
from vigpipe.model.gnn.sage import NarrowingSageLayer, SageLayer
from vigpipe.model.norm import make_norm

_ATTENTION = {"v1": GatLayer, "v2": Gatv2Layer}
_DROPS_FEATURES = ("gcn", "gat", "gcn2")  # models whose published dropout includes the features


def create_graph_model(
    name: GnnModel,
    *,
    in_channels: int,
    num_classes: int,
    num_layers: int,
    width: int,
    heads: int = 1,
    dropout: float = 0.0,
    aggregator: str | None = None,
    norm: GraphNorm = "none",
) -> GraphModel:
    """Make a model; its initial weights are drawn from torch's own generator.

    The width is that of all `heads` of gat together, of which the last layer has one. Dropout comes
    before every layer, except the first of sage and gin, and on attention coefficients. Aggregators
    are mean, max or pool of sage, and v1 or v2 of gat; the first of these by default. A norm comes
    after each layer except that which gives the logits.
    """
    _check(name, width, heads, aggregator)

    def make_layer(i: int) -> GraphLayer:
        inner = nn.Identity() if norm == "none" else make_norm(norm, width)
        if name == "gcn2":
            return Gcn2Layer(width, Setting(i, dropout, inner, Relu()))
        is_last = i == num_layers - 1
        channels = (in_channels if i == 0 else width, num_classes if is_last else width)
        rate = dropout if i or name in _DROPS_FEATURES else 0.0
        activation = F.elu if name == "gat" else Relu()
        rest = (nn.Identity(), None) if is_last else (inner, activation)
        setting = Setting(i, rate, *rest)
        if name == "gat":
            return _ATTENTION[aggregator or "v1"](*channels, setting, 1 if is_last else heads)
        if name == "sage":
            if aggregator in (None, "mean") and channels[0] >= channels[1]:
                return NarrowingSageLayer(*channels, setting)
            return SageLayer(*channels, setting, aggregator or "mean")
        return (GcnLayer if name == "gcn" else GinLayer)(*channels, setting)

    layers = [make_layer(i) for i in range(num_layers)]
    if name == "gcn2":
        return Gcn2Model(in_channels, width, num_classes, layers, dropout)
    return GraphModel(in_channels, width, num_classes, layers, heads)


def _check(name: GnnModel, width: int, heads: int, aggregator: str | None) -> None:
    if heads > 1 and name != "gat":
        raise InputError(f"--heads {heads}: is for gat, and --model is {name}; leave it out")
    if width % heads:
        raise InputError(
            f"--width {width} with --heads {heads}: the width is divided among the heads, so take "
            f"a multiple of {heads}"
        )
    choices = GRAPH_AGGREGATORS.get(name, ())
    if aggregator is not None and aggregator not in choices:
        has = f"has {', '.join(choices)}" if choices else "has no choice; leave it out"
        raise InputError(f"--aggregator {aggregator}: {name} {has}")
