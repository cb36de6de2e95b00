"""Make the sampler that the options name."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vigpipe.config.options import TrainConfig
from vigpipe.errors import InputError
from vigpipe.graphs.graph import Graph
from vigpipe.graphs.partitions.cached import cached_partition
from vigpipe.graphs.partitions.generations import Generations
from vigpipe.graphs.partitions.partition import Partition
from vigpipe.graphs.samplers.parts import Parts
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


_SAMPLERS: dict[str, Callable[[TrainConfig, Graph], Made]] = {"full": _full, "parts": _parts}
