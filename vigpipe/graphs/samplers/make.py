"""Make the sampler that the options name."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vigpipe.config.options import TrainConfig, parse_fanout
from vigpipe.errors import InputError
from vigpipe.graphs.graph import TRAIN, Graph
from vigpipe.graphs.partitions.cached import cached_partition
from vigpipe.graphs.partitions.generations import Generations
from vigpipe.graphs.partitions.partition import Partition
from vigpipe.graphs.samplers.aggregation import kind_of
from vigpipe.graphs.samplers.fastgcn import ImportantNodes
from vigpipe.graphs.samplers.layered import EdgeSampler, InLayers
from vigpipe.graphs.samplers.neighbour import Neighbours
from vigpipe.graphs.samplers.parts import Parts
from vigpipe.graphs.samplers.saint import DrawNodes, Saint, by_edges, by_nodes, by_walks
from vigpipe.graphs.samplers.sampler import Sampler
from vigpipe.graphs.samplers.whole import WholeGraph


class Made(NamedTuple):
    """A sampler.

    Attributes:
        sampler: the sampler.
        partition: the parts that its sub-graphs are made of at first; None if there are none.
    """

    sampler: Sampler
    partition: Partition | None = None


def make_sampler(config: TrainConfig, graph: Graph) -> Made:
    """Make the sampler of --sampler.

    Args:
        config: all options, with the defaults of the model and the sampler filled in.
        graph: the graph.

    Raises:
        InputError: the graph cannot be sampled so.
    """
    assert config.sampler is not None
    return _SAMPLERS[config.sampler](config, graph)


def _full(config: TrainConfig, graph: Graph) -> Made:
    return Made(WholeGraph(graph))


def _parts(config: TrainConfig, graph: Graph) -> Made:
    assert config.partition is not None
    assert config.parts is not None
    assert config.merge is not None
    num_shares = config.dp if config.items == "own" else 1
    if config.merge > config.parts // num_shares:
        whose = f", of which each of {num_shares} replicas has its own" if num_shares > 1 else ""
        raise InputError(
            f"--merge {config.merge}: joins parts, and --parts is {config.parts}{whose}; join fewer"
        )
    path = Path(config.data)
    beside = path if path.suffix == ".npz" else None
    partition = cached_partition(graph, config.partition, config.parts, config.seed, beside)
    generations = Generations(graph, partition, config.repartition_every, config.seed)
    return Made(Parts(graph, generations, config.merge, config.seed, num_shares), partition)


def _saint_nodes(config: TrainConfig, graph: Graph) -> Made:
    assert config.sample_nodes is not None
    draw_nodes = by_nodes(graph, kind_of(config.model), config.sample_nodes)
    return _saint(config, graph, draw_nodes, config.sample_nodes)


def _saint_edges(config: TrainConfig, graph: Graph) -> Made:
    assert config.sample_edges is not None
    _check_edges(config, graph)
    return _saint(config, graph, by_edges(graph, config.sample_edges), 2 * config.sample_edges)


def _saint_walks(config: TrainConfig, graph: Graph) -> Made:
    assert config.roots is not None
    assert config.walk_length is not None
    draw_nodes = by_walks(graph, config.roots, config.walk_length)
    return _saint(config, graph, draw_nodes, config.roots * (config.walk_length + 1))


def _saint(config: TrainConfig, graph: Graph, draw_nodes: DrawNodes, most_drawn: int) -> Made:
    assert config.coverage is not None
    return Made(Saint(graph, draw_nodes, most_drawn, config.coverage, config.seed))


def _fastgcn(config: TrainConfig, graph: Graph) -> Made:
    assert config.layer_nodes is not None
    _check_edges(config, graph)
    nodes = ImportantNodes(graph, kind_of(config.model), config.layer_nodes)
    return _in_layers(config, graph, nodes)


def _neighbour(config: TrainConfig, graph: Graph) -> Made:
    assert config.layers is not None
    fanouts = parse_fanout(config.fanout)
    if len(fanouts) == 1:
        fanouts *= config.layers
    return _in_layers(config, graph, Neighbours(graph, fanouts))


def _in_layers(config: TrainConfig, graph: Graph, edge_sampler: EdgeSampler) -> Made:
    assert config.batch_nodes is not None
    assert config.layers is not None
    if not len(graph.nodes_of(TRAIN)):
        raise InputError(
            f"--sampler {config.sampler}: takes the training nodes of a graph, and {graph.name} "
            "has none; choose --sampler parts or full"
        )
    return Made(InLayers(graph, edge_sampler, config.batch_nodes, config.layers, config.seed))


def _check_edges(config: TrainConfig, graph: Graph) -> None:
    if not graph.num_edges:
        raise InputError(
            f"--sampler {config.sampler}: draws edges, and {graph.name} has none; choose another "
            "--sampler"
        )


_SAMPLERS: dict[str, Callable[[TrainConfig, Graph], Made]] = {
    "full": _full,
    "parts": _parts,
    "saint-node": _saint_nodes,
    "saint-edge": _saint_edges,
    "saint-walk": _saint_walks,
    "fastgcn": _fastgcn,
    "neighbour": _neighbour,
}
