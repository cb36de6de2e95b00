"""`python -m benchmarks gnn`: an epoch on a whole graph, against what else could be run today.

An epoch is forward, backward and Adam's step, with dropout before the second layer, and the
cross-entropy of the training nodes. All contenders have the same layers.
"""

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from torch import Tensor, nn

from benchmarks.alone import MB, peaks, set_up, write_page
from benchmarks.options import GnnBench
from benchmarks.side_by_side import Timings, alternate
from vigpipe.errors import InputError
from vigpipe.graphs.features import for_model, in_memory
from vigpipe.graphs.graph import NO_CLASS, NO_SPLIT, TRAIN, Graph
from vigpipe.graphs.partitions.induced import Induced
from vigpipe.graphs.samplers.whole import all_edges
from vigpipe.graphs.sources import open_graph
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.keyed_dropout import sample_keys
from vigpipe.ops.csr.plain import sparse_matrix

Forward = Callable[[], Tensor]
Maker = Callable[[Graph, GnnBench, torch.device], tuple[nn.Module, Forward]]
_ON_CPUS = "sage: torch.sparse, sparse features, `mm(..., 'sum')`"  # torch has it for CPUs alone
_FEW = 1000  # nodes of the graph that every library is loaded with


def bench_gnn(options: GnnBench) -> None:
    """Time the contenders side by side, measure the memory of each, and write the page.

    Raises:
        InputError: there is no such graph, or an option is out of range.
    """
    device = set_up(options)
    graph = _open(options)
    names = [
        name
        for name in CONTENDERS
        if name.startswith(options.model) and (name != _ON_CPUS or device.type == "cpu")
    ]
    steps = {name: _step(name, graph, options, device) for name in names}
    timings = alternate(steps, names[0], options.repeats, device)
    found = {
        name: peaks(lazily, name, options, device=device.type, threads=options.threads)[1]
        for name in names
    }
    text = (
        f"One epoch of {options.model}, 2 layers, width {options.width}, on the whole graph "
        f"{graph.name} ({graph.num_nodes:,} nodes, {graph.num_edges:,} directed edges, "
        f"{graph.num_features:,} features, {options.features}): forward, backward and Adam in "
        f"float32, dropout {options.dropout:g}, {options.threads} "
        f"thread{'s' * (options.threads != 1)}. Memory is what two epochs add, inputs included, to "
        "a process that has loaded the libraries and the graph."
    )
    title, rows = "Epochs on a whole graph, side by side", _rows(timings, found)
    write_page(options.out, title, text, rows, timings.seconds, device)


def _rows(timings: Timings, memory: Mapping[str, float]) -> list[dict[str, object]]:
    def row(name: str, seconds: Sequence[float]) -> dict[str, object]:
        return {
            "": name,
            "ms an epoch": f"{1e3 * statistics.median(seconds):.0f}",
            "min – max": f"{1e3 * min(seconds):.0f} – {1e3 * max(seconds):.0f}",
            "times the first": f"{statistics.median(timings.ratios(name)):.2f}×",
            "memory": f"{memory[name] / MB:,.0f} MB",
        }

    return [row(name, seconds) for name, seconds in timings.seconds.items()]


def _open(options: GnnBench) -> Graph:
    graph = open_graph(
        options.data,
        data_dir=Path("data"),
        download=False,
        features=options.features,
        symmetric=True,
        seed=0,
    )
    if graph.is_multi_label:
        raise InputError(f"--data {options.data}: has several classes a node; choose another graph")
    return graph


def lazily(name: str, options: GnnBench, *, device: torch.device) -> Callable[[], object]:
    """Open the graph and load all libraries; model and inputs are made by the first call.

    Args:
        name: of the contender.
        options: of the benchmark.
        device: where it computes.

    Returns:
        A function that takes one epoch.
    """
    graph = _open(options)
    nodes = np.arange(min(_FEW, graph.num_nodes))
    indptr, indices, _ = Induced(graph).on(nodes)
    few = replace(
        graph,
        indptr=indptr,
        indices=indices,
        features=graph.features[nodes],  # pyrefly: ignore[bad-argument-type]
        labels=graph.labels[nodes],
        split=np.where(graph.labels[nodes] == NO_CLASS, NO_SPLIT, TRAIN),
    )
    _step(name, few, options, device)()
    made: list[Callable[[], object]] = []

    def step() -> object:
        if not made:
            made.append(_step(name, graph, options, device))
        return made[0]()

    return step


def _step(name: str, graph: Graph, options: GnnBench, device: torch.device) -> Callable[[], object]:
    torch.manual_seed(0)
    model, forward = CONTENDERS[name](graph, options, device)
    optimizer = torch.optim.Adam(model.to(device).parameters(), lr=0.01, fused=True)
    nodes = graph.nodes_of(TRAIN)
    rows = torch.from_numpy(nodes).to(device)
    labels = torch.from_numpy(graph.labels[nodes]).to(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward()[rows], labels).backward()
        optimizer.step()

    return step


def _ours(is_sparse: bool) -> Maker:
    def make(graph: Graph, options: GnnBench, device: torch.device) -> tuple[nn.Module, Forward]:
        model = create_graph_model(
            options.model,
            in_channels=graph.num_features,
            num_classes=graph.num_classes,
            num_layers=2,
            width=options.width,
            heads=options.heads if options.model == "gat" else 1,
            dropout=options.dropout,
        )
        if options.model == "gat":  # as the others: between the layers only
            layers: Any = model.convs
            layers["0"].dropout.rate = layers["0"].attention_dropout.rate = 0.0
            layers["1"].attention_dropout.rate = 0.0
        adjacency = all_edges(graph).to(device)
        x = for_model(in_memory(graph.features), is_sparse).to(device, torch.float32)
        keys = sample_keys(0, 0, torch.arange(graph.num_nodes)).to(device)
        return model, lambda: model(x, keys, adjacency)

    return make


def _geometric(kind: str) -> Maker:
    def make(graph: Graph, options: GnnBench, device: torch.device) -> tuple[nn.Module, Forward]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what importing torch-geometric sets off
            import torch_geometric.nn as geometric
        channels = (graph.num_features, options.width), (options.width, graph.num_classes)
        if options.model == "gat":
            (d, width), last = channels
            layers = [
                geometric.GATConv(d, width // options.heads, options.heads),
                geometric.GATConv(*last),
            ]
        else:
            layers = [geometric.SAGEConv(*pair) for pair in channels]
        model = nn.ModuleList(layers)
        adjacency = all_edges(graph)
        if kind == "torch.sparse":
            edges = sparse_matrix(adjacency, torch.ones(graph.num_edges))
        else:
            edges = torch.stack((adjacency.indices, adjacency.targets))
        x, edges = for_model(in_memory(graph.features), is_sparse=False), edges.to(device)
        dense: Any = x.to(device, torch.float32)
        activation = F.elu if options.model == "gat" else F.relu

        def forward() -> Tensor:
            return _two(layers, dense, edges, activation, options.dropout)

        return model, torch.compile(forward) if kind == "compiled" else forward

    return make


def _two(
    layers: Sequence[nn.Module],
    x: Tensor,
    edges: Tensor,
    activation: Callable[[Tensor], Tensor],
    dropout: float,
) -> Tensor:
    first, second = layers
    return second(F.dropout(activation(first(x, edges)), dropout), edges)


def _by_hand(reduce: bool) -> Maker:
    """Make sage of sparse products of torch, with as few channels in them as possible."""

    def make(graph: Graph, options: GnnBench, device: torch.device) -> tuple[nn.Module, Forward]:
        width, num_classes = options.width, graph.num_classes
        layers = nn.ModuleList(
            nn.Linear(*channels, bias=bias)
            for channels in ((graph.num_features, width), (width, num_classes))
            for bias in (False, True)
        )
        left, right, second_left, second_right = layers
        adjacency = all_edges(graph)
        mean = sparse_matrix(adjacency, adjacency.weights("mean", torch.float32)).to(device)
        features: Any = for_model(csr_array(in_memory(graph.features)), is_sparse=True)
        x = sparse_matrix(features.places, features.values).to(device)

        def product(matrix: Tensor, dense: Tensor) -> Tensor:
            return torch.sparse.mm(matrix, dense, "sum") if reduce else matrix @ dense

        def forward() -> Tensor:
            weights: Any = left.weight, right.weight, right.bias
            own = product(x, weights[1].T) + weights[2]
            hidden = (product(mean, product(x, weights[0].T)) + own).relu()
            hidden = F.dropout(hidden, options.dropout)
            return product(mean, second_left(hidden)) + second_right(hidden)

        return layers, forward

    return make


CONTENDERS: dict[str, Maker] = {
    "sage: torch-geometric, edge index": _geometric("edge index"),
    "sage: torch-geometric, edge index, compiled": _geometric("compiled"),
    "sage: torch-geometric, torch.sparse": _geometric("torch.sparse"),
    "sage: torch.sparse, sparse features, `@`": _by_hand(reduce=False),
    _ON_CPUS: _by_hand(reduce=True),
    "sage: vigpipe, dense features": _ours(is_sparse=False),
    "sage: vigpipe, sparse features": _ours(is_sparse=True),
    "gat: torch-geometric, edge index": _geometric("edge index"),
    "gat: torch-geometric, edge index, compiled": _geometric("compiled"),
    "gat: vigpipe, dense features": _ours(is_sparse=False),
    "gat: vigpipe, sparse features": _ours(is_sparse=True),
}
