"""Small random directed graphs, and torch-geometric's models of them."""

import warnings
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe.ops.adjacency import Adjacency, Excerpt, Layered


def random_adjacency(num_nodes: int = 40, share: float = 0.1, seed: int = 0) -> Adjacency:
    """Edges at random, self-loops among them; nodes 3 and 4 have none, and none enter node 5."""
    numbers = torch.rand(num_nodes, num_nodes, generator=torch.Generator().manual_seed(seed))
    edges = numbers < share
    if num_nodes > 6:
        edges[6, :] = True
        edges[[3, 4, 5], :] = False
        edges[:, [3, 4]] = False
    return from_dense(edges)


def from_dense(edges: Tensor) -> Adjacency:
    """Rows of a matrix whose element (v, u) tells whether there is an edge from u to v."""
    indptr = F.pad(edges.sum(1).cumsum(0), (1, 0))
    return Adjacency(indptr, edges.nonzero()[:, 1].contiguous(), edges.shape[1])


def random_layers(*sizes: int) -> Layered:
    """Sampled edges for layers that take so many nodes, and the number that the last one makes."""
    edges, layers = to_dense(random_adjacency(sizes[0])), []
    degrees = edges.sum(1)
    for num_sources, num_targets in pairwise(sizes):
        rows = from_dense(edges[:num_targets, :num_sources])
        factors = 1 + rows.indices.double() / 7
        counts = degrees[:num_sources]
        layers.append(Excerpt(rows.indptr, rows.indices, factors, counts, counts + 1))
    return Layered(layers)


def to_dense(adjacency: Adjacency) -> Tensor:
    edges = torch.zeros(adjacency.num_targets, adjacency.num_sources, dtype=torch.bool)
    edges[adjacency.targets, adjacency.indices] = True
    return edges


def edge_index(adjacency: Adjacency) -> Tensor:
    """(2, e), sources above targets, as torch-geometric has it."""
    return torch.stack((adjacency.indices, adjacency.targets))


def pyg() -> Any:
    with warnings.catch_warnings():
        # What importing torch-geometric 2.7 and 2.8 sets off under torch 2.11 to 2.15.
        warnings.filterwarnings("ignore", ".torch.jit.")
        warnings.filterwarnings("ignore", ".torch_geometric.distributed. has been deprecated")
        import torch_geometric.nn
    return torch_geometric.nn


def pyg_layer(name: str, channels: tuple[int, int], heads: int, aggregator: str | None) -> Any:
    lib, (first, last) = pyg(), channels
    if name == "gcn":
        return lib.GCNConv(first, last)
    if name == "sage":
        aggr = "mean" if aggregator in (None, "mean") else "max"
        return lib.SAGEConv(first, last, aggr=aggr, project=aggregator == "pool")
    if name == "gin":
        return lib.GINConv(lib.MLP([first, last, last], norm=None), train_eps=True)
    kind = lib.GATv2Conv if aggregator == "v2" else lib.GATConv
    return kind(first, last // heads, heads)


class PygModel(nn.Module):
    """torch-geometric's layers with norm and activation between them, or its GCNII."""

    def __init__(
        self,
        name: str,
        in_channels: int,
        num_classes: int,
        num_layers: int,
        width: int,
        heads: int = 1,
        aggregator: str | None = None,
        norm: str = "none",
    ) -> None:
        super().__init__()
        self.name = name
        lib = pyg()
        kinds = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
        if name == "gcn2":
            convs = [lib.GCN2Conv(width, 0.1, 0.5, i + 1) for i in range(num_layers)]
            self.stem, self.readout = nn.Linear(in_channels, width), nn.Linear(width, num_classes)
        else:
            sizes = [in_channels, *[width] * (num_layers - 1), num_classes]
            counts = [heads] * (num_layers - 1) + [1]
            pairs = pairwise(sizes)
            convs = [
                pyg_layer(name, pair, count, aggregator)
                for pair, count in zip(pairs, counts, strict=True)
            ]
        self.convs = nn.ModuleList(convs)
        num_norms = num_layers if name == "gcn2" else num_layers - 1
        for conv in convs[:num_norms]:
            conv.norm = nn.Identity() if norm == "none" else kinds[norm](width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if self.name == "gcn2":
            x = first = self.stem(x).relu()
            for conv in self.convs:
                x = conv.norm(conv(x, first, edges)).relu()  # pyrefly: ignore[not-callable]
            return self.readout(x)
        activation = F.elu if self.name.startswith("gat") else F.relu
        for conv in self.convs[:-1]:
            x = activation(conv.norm(conv(x, edges)))  # pyrefly: ignore[not-callable]
        return self.convs[-1](x, edges)
