"""Small random directed graphs, and torch-geometric's models of them."""

import warnings
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe.ops.adjacency import Adjacency, Excerpt, Layered


def random_adjacency(
    num_nodes: int = 40, share: float = 0.1, seed: int = 0, *, weighted: bool = False
) -> Adjacency:
    """Edges at random, self-loops among them; nodes 3 and 4 have none, and none enter node 5."""
    numbers = torch.rand(num_nodes, num_nodes, generator=torch.Generator().manual_seed(seed))
    edges = numbers < share
    if num_nodes > 6:
        edges[6, :] = True
        edges[[3, 4, 5], :] = False
        edges[:, [3, 4]] = False
    return with_weights(from_dense(edges)) if weighted else from_dense(edges)


def with_weights(adjacency: Adjacency) -> Adjacency:
    draws = torch.Generator().manual_seed(9)
    weights = 0.1 + 3 * torch.rand(adjacency.num_edges, generator=draws, dtype=torch.float64)
    return Adjacency(adjacency.indptr, adjacency.indices, edge_weights=weights)


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


def weighted_layer(name: str, channels: tuple[int, int], heads: int, aggregator: str | None) -> Any:
    """Make a layer that takes weights of edges, which of torch-geometric's only GCN's have."""
    lib, (first, last) = pyg(), channels
    from torch_geometric.utils import add_remaining_self_loops, softmax

    class Weighted(lib.MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="add", node_dim=0)

        def message(self, x_j: Tensor, shares: Tensor) -> Tensor:
            return shares[:, None] * x_j if x_j.dim() == 2 else shares[:, :, None] * x_j

    class Sage(Weighted):
        def __init__(self) -> None:
            super().__init__()
            self.lin_l, self.lin_r = lib.Linear(first, last), lib.Linear(first, last, bias=False)

        def forward(self, x: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
            sums = self.propagate(edges, x=x, shares=weights)
            total = weights.new_zeros(len(x)).index_add(0, edges[1], weights)
            return self.lin_l(sums / total.where(total > 0, 1.0)[:, None]) + self.lin_r(x)

    class Gin(Weighted):
        def __init__(self) -> None:
            super().__init__()
            self.nn = lib.MLP([first, last, last], norm=None)
            self.eps = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
            return self.nn((1 + self.eps) * x + self.propagate(edges, x=x, shares=weights))

    class Gat(Weighted):
        def __init__(self) -> None:
            super().__init__()
            if aggregator == "v2":
                self.lin_l, self.lin_r = lib.Linear(first, last), lib.Linear(first, last)
                self.att = nn.Parameter(torch.empty(1, heads, last // heads))
            else:
                self.lin = lib.Linear(first, last, bias=False)
                self.att_src = nn.Parameter(torch.empty(1, heads, last // heads))
                self.att_dst = nn.Parameter(torch.empty(1, heads, last // heads))
            self.bias = nn.Parameter(torch.empty(last))

        def forward(self, x: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
            looped: Any = add_remaining_self_loops(edges, weights, 1.0, len(x))
            (sources, targets), weights = looped
            of_heads = (len(x), heads, last // heads)
            if aggregator == "v2":
                sent, kept = self.lin_l(x).view(of_heads), self.lin_r(x).view(of_heads)
                scores = (F.leaky_relu(sent[sources] + kept[targets], 0.2) * self.att).sum(-1)
            else:
                sent = self.lin(x).view(of_heads)
                ends = ((sent * self.att_src).sum(-1), (sent * self.att_dst).sum(-1))
                scores = F.leaky_relu(ends[0][sources] + ends[1][targets], 0.2)
            shares = softmax(scores + weights.log()[:, None], targets, num_nodes=len(x))
            y = self.propagate(torch.stack((sources, targets)), x=sent, shares=shares)
            return y.flatten(1) + self.bias

    if name == "gcn":
        return lib.GCNConv(first, last)
    return {"sage": Sage, "gin": Gin, "gat": Gat}[name]()


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
        edge_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.name, self.edge_weights = name, edge_weights
        make_layer = pyg_layer if edge_weights is None else weighted_layer
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
                make_layer(name, pair, count, aggregator)
                for pair, count in zip(pairs, counts, strict=True)
            ]
        self.convs = nn.ModuleList(convs)
        num_norms = num_layers if name == "gcn2" else num_layers - 1
        for conv in convs[:num_norms]:
            conv.norm = nn.Identity() if norm == "none" else kinds[norm](width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        weights = () if self.edge_weights is None else (self.edge_weights,)
        if self.name == "gcn2":
            x = first = self.stem(x).relu()
            for conv in self.convs:
                x = conv.norm(conv(x, first, edges, *weights)).relu()  # pyrefly: ignore[not-callable]
            return self.readout(x)
        activation = F.elu if self.name.startswith("gat") else F.relu
        for conv in self.convs[:-1]:
            x = activation(conv.norm(conv(x, edges, *weights)))  # pyrefly: ignore[not-callable]
        return self.convs[-1](x, edges, *weights)
