"""Make the sampler that the options name."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from vigpipe.config.options import TrainConfig, parse_fanout
from vigpipe.config.prepared import is_prepared
from vigpipe.errors import InputError
from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.partitions.cached import cached_partition
from vigpipe.graphs.partitions.generations import Generations
from vigpipe.graphs.partitions.partition import Method, Partition
from vigpipe.graphs.prepared.graph import PreparedGraph
from vigpipe.graphs.samplers.aggregation import weighting_of
from vigpipe.graphs.samplers.counts import kept_counts
from vigpipe.graphs.samplers.draws import DrawNodes
from vigpipe.graphs.samplers.fastgcn import ImportantNodes
from vigpipe.graphs.samplers.layered import EdgeSampler, InLayers
from vigpipe.graphs.samplers.neighbour import Neighbours
from vigpipe.graphs.samplers.parts import Parts
from vigpipe.graphs.samplers.saint import Saint, by_edges, by_nodes, by_walks
from vigpipe.graphs.samplers.sampler import Sampler
from vigpipe.graphs.samplers.whole import WholeGraph


def make_sampler(config: TrainConfig, graph: Graph) -> Sampler:
    """Make the sampler of --sampler; InputError if the graph cannot be sampled so."""
    assert config.sampler is not None
    return _SAMPLERS[config.sampler](config, graph)


def _parts(config: TrainConfig, graph: Graph) -> Sampler:
    assert config.partition is not None
    assert config.parts is not None
    assert config.merge is not None
    num_groups = config.dp if config.items == "own" else 1
    most = config.parts // num_groups
    if config.merge > most:
        whose = f", of which each of {num_groups} replicas has its own" if num_groups > 1 else ""
        advice = f"join {most} at most, or choose" if most else "choose fewer replicas, or"
        raise InputError(
            f"--merge {config.merge}: joins parts, and --parts is {config.parts}{whose}; {advice} "
            f"--parts {num_groups * config.merge} or more"
        )
    partition = _partition(graph, config.partition, config.parts, config)
    generations = Generations(graph, partition, config.repartition_every, config.seed)
    return Parts(graph, generations, config.merge, config.seed, num_groups)


def _partition(graph: Graph, method: Method, num_parts: int, config: TrainConfig) -> Partition:
    """Return the parts of a prepared folder, if these are asked for; otherwise cut the graph."""
    if isinstance(graph, PreparedGraph):
        own = graph.partition
        if (method, num_parts) == (own.method, own.num_parts):
            return own
    return cached_partition(graph, method, num_parts, config.seed, _beside(config))


def make_rank_parts(config: TrainConfig, graph: Graph, num_ranks: int) -> Partition:
    """Cut a graph into one part of METIS for each rank that shares it."""
    return _partition(graph, "metis", num_ranks, config)


def _saint_nodes(config: TrainConfig, graph: Graph) -> Sampler:
    assert config.sample_nodes is not None
    num, weighting = config.sample_nodes, "gcn" if weighting_of(config.model) == "gcn" else "mean"
    return _saint(config, graph, (weighting, num), by_nodes(graph, weighting, num), num)


def _saint_edges(config: TrainConfig, graph: Graph) -> Sampler:
    assert config.sample_edges is not None
    _check_edges(config, graph)
    num, has_edge = config.sample_edges, np.diff(graph.indptr) > 0
    has_edge[graph.sources()] = True
    is_train = graph.split == TRAIN
    if is_train.any() and not (is_train & has_edge).any():
        raise InputError(
            f"--sampler {config.sampler}: draws the ends of edges, and no training node of "
            f"{graph.name} has one, of {np.count_nonzero(is_train):,}; choose another --sampler"
        )
    return _saint(config, graph, (num,), by_edges(graph, num), 2 * num, has_edge)


def _saint_walks(config: TrainConfig, graph: Graph) -> Sampler:
    assert config.roots is not None
    assert config.walk_length is not None
    sizes = config.roots, config.walk_length
    most_drawn = config.roots * (config.walk_length + 1)
    return _saint(config, graph, sizes, by_walks(graph, *sizes), most_drawn)


def _saint(
    config: TrainConfig,
    graph: Graph,
    drawn_by: tuple[object, ...],
    draw_nodes: DrawNodes,
    most_drawn: int,
    can_come: np.ndarray | None = None,
) -> Sampler:
    """Make a sampler of GraphSAINT whose draws depend on sampler, graph, seed and `drawn_by`."""
    assert config.coverage is not None
    name = "-".join(map(str, (config.sampler, *drawn_by)))
    counts = kept_counts(graph, name, draw_nodes, config.coverage, config.seed, _beside(config))
    return Saint(graph, draw_nodes, most_drawn, counts, config.seed, can_come)


def _fastgcn(config: TrainConfig, graph: Graph) -> Sampler:
    assert config.layer_nodes is not None
    _check_edges(config, graph)
    nodes = ImportantNodes(graph, weighting_of(config.model), config.layer_nodes)
    return _in_layers(config, graph, nodes)


def _neighbour(config: TrainConfig, graph: Graph) -> Sampler:
    assert config.layers is not None
    fanouts = parse_fanout(config.fanout)
    if len(fanouts) == 1:
        fanouts *= config.layers
    return _in_layers(config, graph, Neighbours(graph, fanouts))


def _in_layers(config: TrainConfig, graph: Graph, edge_sampler: EdgeSampler) -> Sampler:
    assert config.batch_nodes is not None
    assert config.layers is not None
    if not len(graph.nodes_of(TRAIN)):
        raise InputError(
            f"--sampler {config.sampler}: takes the training nodes of a graph, and {graph.name} "
            "has none; choose --sampler parts or full"
        )
    return InLayers(graph, edge_sampler, config.batch_nodes, config.layers, config.seed)


def _beside(config: TrainConfig) -> Path | None:
    """Return the graph's file or folder, if it has one of its own; see `read_kept`."""
    path = Path(config.data)
    return path if path.suffix == ".npz" or is_prepared(config.data) else None


def _check_edges(config: TrainConfig, graph: Graph) -> None:
    if not graph.num_edges:
        raise InputError(
            f"--sampler {config.sampler}: draws edges, and {graph.name} has none; choose another "
            "--sampler"
        )


_SAMPLERS: dict[str, Callable[[TrainConfig, Graph], Sampler]] = {
    "full": lambda _, graph: WholeGraph(graph),
    "parts": _parts,
    "saint-node": _saint_nodes,
    "saint-edge": _saint_edges,
    "saint-walk": _saint_walks,
    "fastgcn": _fastgcn,
    "neighbour": _neighbour,
}
