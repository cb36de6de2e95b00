"""Which parts an epoch takes: the same ones throughout, or others every few epochs."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vigpipe.graphs.graph import Graph, neighbours
from vigpipe.graphs.partitions.balance import balanced
from vigpipe.graphs.partitions.partition import Partition, measured
from vigpipe.job.fit import fit_costs

GROWTH = 2  # parts that are balanced by time have at most so many times the mean number of nodes


class Rates(NamedTuple):
    """How many seconds each node and each edge of a sub-graph were measured to take."""

    per_node: float
    per_edge: float


class Generations:
    """The parts of a run, one generation of them after the other.

    The first generation is the partition. Random parts are drawn anew for each further one: which
    nodes are in which part depends on seed and generation only, while the parts keep their sizes.
    The others are balanced by measured time, and keep their nodes until there are measurements. A
    generation lasts `every` epochs, or the whole run if that is None.
    """

    def __init__(self, graph: Graph, first: Partition, every: int | None, seed: int) -> None:
        self._graph, self._first, self._every, self._seed = graph, first, every, seed
        self.rates: list[Rates] = []  # what was measured in the generations that have ended
        self.most_nodes = first.sizes  # a bound for every part in all generations, (k,) int64
        if self.are_measured:
            self._most = min(-(-GROWTH * graph.num_nodes // first.num_parts), graph.num_nodes)
            self.most_nodes = np.maximum(first.sizes, self._most)
        self._make = lru_cache(2)(self._partition)  # replicas may be in different epochs
        self._costs = lru_cache(1)(lambda rates: node_costs(graph, first.parts, rates))

    @property
    def are_measured(self) -> bool:
        return self._every is not None and self._first.method != "random"

    def number(self, epoch: int) -> int:
        """Return the number of the generation, from 0, of an epoch, which is counted from 1."""
        return 0 if self._every is None else (epoch - 1) // self._every

    def partition(self, epoch: int) -> Partition:
        number = self.number(epoch)
        return self._make(min(number, len(self.rates)) if self.are_measured else number)

    def describe(self, number: int) -> str:
        rates, before = self.rates[number - 1], self._first
        after = self._make(number)
        loads = [np.bincount(of.parts, self._costs(rates)) for of in (before, after)]
        slowest = [float(load.max() / load.mean()) for load in loads]
        return (
            f"since a node takes {1e6 * rates.per_node:.3g} µs and an edge "
            f"{1e6 * rates.per_edge:.3g} µs, the slowest part goes from {slowest[0]:.2f} to "
            f"{slowest[1]:.2f} times the mean time; {after}"
        )

    def _partition(self, number: int) -> Partition:
        first, graph = self._first, self._graph
        if number == 0:
            return first
        if not self.are_measured:
            parts = np.random.default_rng([self._seed, number]).permutation(first.parts)
        else:
            costs = self._costs(self.rates[number - 1])
            parts = balanced(neighbours(graph), first.parts, costs, first.num_parts, self._most)
        return measured(graph, first.method, parts, first.num_parts, 0.0)


def node_costs(graph: Graph, parts: np.ndarray, rates: Rates) -> np.ndarray:
    """Return the seconds of each node and its edges in its part, (n,); ones if none took any."""
    targets = graph.targets()
    kept = targets[parts[targets] == parts[graph.sources()]]
    num_edges = np.bincount(kept, minlength=graph.num_nodes)
    costs = rates.per_node + rates.per_edge * num_edges
    return costs if costs.any() else np.ones(graph.num_nodes)


def fit_rates(sizes: Sequence[tuple[int, int]], seconds: Sequence[float]) -> Rates:
    """Find the rates that explain how long sub-graphs of some nodes and edges took; 0 without any.

    There is no constant time: where all parts have the same number of nodes, as those of METIS, it
    would take the place of the time per node.
    """
    if not sizes:
        return Rates(0.0, 0.0)
    return Rates(*fit_costs(sizes, seconds, constant=False))
