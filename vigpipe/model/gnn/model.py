"""A staged model whose samples are nodes of one graph, and whose blocks are graph layers."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from vigpipe.model.gnn.edges import Edges
from vigpipe.model.gnn.features import (
    AnyFeatures,
    first_rows,
    in_chunks,
    rows_at_once,
    select_columns,
    slice_rows,
)
from vigpipe.model.gnn.layer import GraphLayer
from vigpipe.model.graph import report_anomaly
from vigpipe.model.keyed_dropout import ChannelDropout, Draws
from vigpipe.model.regions import region
from vigpipe.model.slicing import INPUT, Side, Sides, Slicing
from vigpipe.model.staged import StagedModel
from vigpipe.ops.adjacency import Adjacency, Layered
from vigpipe.ops.sparse_rows import SparseRows, linear

_OF_CLASSES = ("out", "head")  # roles in the layer that gives the logits


class GraphModel(StagedModel):
    """Graph layers, the last of which gives the logits; stem and readout have no parameters.

    Parameter names are those of torch-geometric's BasicGNN, apart from the norms', which are parts
    of their layers. The width, the channels between two layers, is divided among the heads.
    """

    blocks_name = "convs"

    def __init__(
        self,
        in_channels: int,
        width: int,
        num_classes: int,
        layers: Sequence[GraphLayer],
        heads: int = 1,
    ) -> None:
        super().__init__(len(layers), num_classes)
        self.in_channels, self.width, self.num_layers = in_channels, width, len(layers)
        self.heads = heads
        self.detect_anomaly, self.decays = False, "all"  # or "first": the layers that decay
        # Is given, in `by_layer`, what the layer takes that gives the logits.
        self.listener: Callable[[AnyFeatures], None] | None = None
        self._last_selection: tuple[AnyFeatures, Tensor, AnyFeatures] | None = None
        self.convs = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})

    def boundary_shapes(self, block: int) -> tuple[tuple[int, ...], ...]:
        if block == 0:
            return ((self.in_channels,),)
        return ((self.num_classes if block == self.num_layers else self.width,),)

    def embed(self, images: AnyFeatures, draws: Draws | None = None) -> AnyFeatures:
        return images

    def _select_input(self, x: AnyFeatures) -> AnyFeatures:
        """Return the columns of the graph's features that the model takes; keep them if sparse."""
        columns = self.input_channels
        if not self.has_stem or columns is None or len(columns) == x.shape[1]:
            return x
        last = self._last_selection
        if last is None or last[0] is not x or last[1] is not columns:
            last = x, columns, select_columns(x, columns)
        # A tensor is a new view in every call, so that keeping its columns would be of no use.
        self._last_selection = None if isinstance(x, Tensor) else last
        return last[2]

    def _tell(self, x: AnyFeatures) -> None:
        if self.listener is not None:
            self.listener(x)

    def read_out(self, x: Tensor, draws: Draws | None) -> Tensor:
        return x

    def slicing(self, partition_input: bool = False) -> Slicing:
        """Make the table: `channels.1` are those after layer 0, and every head is divided."""
        between = [Side(f"channels.{i}", repeats=self.heads) for i in range(1, self.num_layers)]
        ends = [Side(INPUT) if partition_input else None, *between, None]
        return self._slicing(list(pairwise(ends)), {})

    def _slicing(
        self, ends: Sequence[tuple[Side | None, Side | None]], others: Mapping[str, Sides]
    ) -> Slicing:
        """Make the table from the sides of the layers' ends, and those of tensors of no layer."""
        tensors = self.state_dict()
        sides = {name: dims for name, dims in others.items() if name in tensors}
        for name, layer in self.convs.items():
            assert isinstance(layer, GraphLayer)
            sides |= layer.sides(f"{self.blocks_name}.{name}.", int(name), ends[int(name)])
        return Slicing.of(tensors, sides)

    def classifier(self) -> tuple[tuple[str, ...], dict[str, int]]:
        last = str(self.num_layers - 1)
        layer = self.convs[last]
        assert isinstance(layer, GraphLayer)
        # The last layer of gat has one head, whose channels are the classes.
        roles = layer.roles.items()
        prefix = f"{self.blocks_name}.{last}."
        dims = {
            prefix + name: i
            for name, of in roles
            for i, role in enumerate(of)
            if role in _OF_CLASSES
        }
        return (prefix,), dims

    def set_detect_anomaly(self, enable: bool) -> None:
        self.detect_anomaly = enable

    def no_weight_decay(self) -> set[str]:
        if self.decays == "all":
            return set()
        return {name for name, _ in self.named_parameters() if not name.startswith("convs.0.")}

    def forward(
        self,
        x: AnyFeatures,
        keys: Tensor | Draws | None = None,
        adjacency: Adjacency | Layered | Edges | None = None,
        features: SparseRows | None = None,
    ) -> Tensor:
        """Run stem, layers and readout, as far as they are present, on the nodes of a batch.

        x are the graph's features, (n, in_channels), or the output of the previous stage, of which
        only the rows count that its last layer has made. The result has only the rows of the nodes
        that the edges of the last layer end in. The adjacency has the edges of all layers or of
        each, or stands for them where several ranks share a graph. `features` are the graph's where
        these are sparse and x, from a pipeline, has no columns; x may be sparse, too.
        """
        if adjacency is None or not adjacency.suits(len(x), self.span[0], self.num_layers):
            raise ValueError(f"a graph model needs the edges of its {len(x)} nodes in every layer")
        x = self._select_input(x if features is None else features)
        draws = self.draws_for(x, keys)
        if self.has_stem:
            x = self.run_stem(x, draws)
        for name, layer in self.convs.items():
            edges = adjacency.of_layer(int(name))
            x, draws = _first(edges.num_sources, x, draws)
            x = self.run(name, layer, x, draws, edges)
            if self.detect_anomaly:
                _check_finite(x, name)
        if not self.has_readout:
            return x
        x, draws = _first(adjacency.num_targets, x, draws)
        return region("readout", self.read_out, x, draws)

    @torch.no_grad()
    def by_layer(
        self,
        x: AnyFeatures,
        adjacency: Adjacency | Edges,
        features: AnyFeatures | None = None,
        *,
        chunk: int,
    ) -> Tensor:
        """Evaluate what is present on a whole graph, each layer in chunks of nodes.

        Besides the input and the output of one layer, and what all nodes send in it, memory holds
        what a chunk needs. Results equal those of `forward` up to rounding: a matrix product may
        sum in another order for another number of rows. If several ranks share the graph, each
        takes all of its nodes through a layer at once.
        """
        if self.training:
            raise ValueError("by_layer evaluates: call model.eval() first")
        x = self._select_input(x if features is None else features)
        if self.has_stem and self.stem_names:
            rows = rows_at_once(x, chunk)
            x = in_chunks(lambda start, end: self.embed(slice_rows(x, start, end)), len(x), rows)
        for name, layer in self.convs.items():
            assert isinstance(layer, GraphLayer)
            if int(name) == self.num_layers - 1 and not self.readout_names:
                self._tell(x)
            if isinstance(adjacency, Edges):
                x = layer(x, None, adjacency)
            else:
                x = _layer_in_chunks(layer, x, adjacency, chunk)
        if self.has_readout:
            if self.readout_names:
                self._tell(x[:, : self.width])
            x = in_chunks(lambda start, end: self.read_out(x[start:end], None), len(x), chunk)
        return x


class Gcn2Model(GraphModel):
    """GCNII: a linear stem with ReLU, layers that keep the width, a linear readout.

    Between layers, every node has its features and its first features side by side, so `width`
    channels of each. There is dropout before stem and readout, too.
    """

    stem_names = ("stem",)
    readout_names = ("readout",)

    def __init__(
        self,
        in_channels: int,
        width: int,
        num_classes: int,
        layers: Sequence[GraphLayer],
        dropout: float,
    ) -> None:
        super().__init__(in_channels, width, num_classes, layers)
        self.stem = nn.Linear(in_channels, width)
        self.readout = nn.Linear(width, num_classes)
        # Layers have the streams 0 ... 2 * num_layers - 1.
        self.stem_dropout = ChannelDropout(dropout, stream=2 * len(layers))
        self.readout_dropout = ChannelDropout(dropout, stream=2 * len(layers) + 1)

    def boundary_shapes(self, block: int) -> tuple[tuple[int, ...], ...]:
        return ((2 * self.width,),)

    def embed(self, images: AnyFeatures, draws: Draws | None = None) -> Tensor:
        """Run the stem: (n, in_channels) -> (n, 2 * width)."""
        x, fused = self.stem_dropout(images, draws), self.stem_dropout.fused
        first = linear(x, self.stem.weight, self.stem.bias, fused=fused).relu()
        return torch.cat((first, first), dim=1)

    def slicing(self, partition_input: bool = False) -> Slicing:
        """Make the table, of one group, as the first features are added to those of every layer."""
        side = Side("channels")
        others = {
            "stem.weight": (side, Side(INPUT) if partition_input else None),
            "stem.bias": (side,),
            "readout.weight": (None, side),
            "readout.bias": (None,),
        }
        return self._slicing([(side, side)] * self.num_layers, others)

    def classifier(self) -> tuple[tuple[str, ...], dict[str, int]]:
        return ("readout.",), {"readout.weight": 0, "readout.bias": 0}

    def read_out(self, x: Tensor, draws: Draws | None) -> Tensor:
        return self.readout(self.readout_dropout(x[:, : self.width], draws))


def _layer_in_chunks(layer: GraphLayer, x: AnyFeatures, adjacency: Adjacency, chunk: int) -> Tensor:
    chunk, few = rows_at_once(x, chunk), slice_rows(x, 0, 1)
    if layer.messages(few) is few:  # the layer sends features as they are
        messages = slice_rows(x, 0, len(x))
    else:
        messages = in_chunks(lambda i, j: layer.messages(slice_rows(x, i, j)), len(x), chunk)

    def received(start: int, end: int) -> Tensor:
        return layer.received(messages, slice_rows(x, start, end), adjacency.rows(start, end))

    return in_chunks(received, len(x), chunk)


def _first(num: int, x: AnyFeatures, draws: Draws | None) -> tuple[AnyFeatures, Draws | None]:
    """Return the first rows, with what was drawn for them."""
    if draws is not None and len(draws.keys) != num:
        draws = draws.part(0, num)
    return first_rows(x, num), draws


def _check_finite(x: Tensor, name: str) -> None:
    num_bad = int((~x.isfinite().all(1)).sum())
    if num_bad:
        report_anomaly(
            f"block {name}: {num_bad} of {len(x)} nodes have NaN or infinite features after the "
            "layer"
        )
