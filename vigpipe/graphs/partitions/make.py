"""Make a partition of a graph by one of METHODS."""

import math
import time

import numpy as np
from scipy.sparse import csr_array
from threadpoolctl import threadpool_limits

from vigpipe.errors import InputError
from vigpipe.graphs.graph import TRAIN, Graph, neighbours
from vigpipe.graphs.partitions.balance import balanced
from vigpipe.graphs.partitions.metis import metis_parts
from vigpipe.graphs.partitions.partition import METHODS, Method, Partition, measured


def make_partition(graph: Graph, method: Method, num_parts: int, seed: int) -> Partition:
    """Cut a graph into parts by a method of METHODS, none of which is empty.

    Random parts are drawn uniformly for each node, so that parts differ in size by chance; two
    nodes share a part with probability 1 / k. `spectral` and `walks` cannot place nodes without
    neighbours, which draw their parts instead. `metis-train` moves nodes of `metis`, so that each
    part has its share of the training nodes, and of the others. Where a method leaves parts empty,
    each of these gets a node of the part that is largest then. The same seed gives the same parts,
    whatever the number of threads.
    """
    check_request(graph, method, num_parts, seed)
    start = time.perf_counter()
    # Several threads would add up numbers in another order each time.
    with threadpool_limits(limits=1):
        parts = _parts(graph, method, num_parts, np.random.default_rng(seed))
    fill_empty(parts, num_parts)
    return measured(graph, method, parts, num_parts, time.perf_counter() - start)


def _parts(graph: Graph, method: str, num_parts: int, draws: np.random.Generator) -> np.ndarray:
    """Return the part of each node, (n,) int64; a part may be empty."""
    if method == "random":
        return draws.integers(num_parts, size=graph.num_nodes)
    joined = neighbours(graph)
    if method.startswith("metis"):
        parts = metis_parts(joined, num_parts, draws)
        if method == "metis-train":
            is_train = graph.split == TRAIN
            for moved in (is_train, ~is_train):
                ones, most = moved.astype(np.float64), math.ceil(moved.sum() / num_parts)
                parts = balanced(joined, parts, ones, num_parts, graph.num_nodes, most)
        return parts
    # These import scikit-learn, which takes 0.7 s, and which no other method needs.
    from vigpipe.graphs.partitions.spectral import spectral_parts
    from vigpipe.graphs.partitions.walks import walk_parts

    parts = draws.integers(num_parts, size=graph.num_nodes)
    nodes = np.flatnonzero(np.diff(joined.indptr))
    if len(nodes):
        among = csr_array(joined[nodes][:, nodes])  # pyrefly: ignore[bad-index]
        clusters = spectral_parts if method == "spectral" else walk_parts
        parts[nodes] = clusters(among, min(num_parts, len(nodes)), draws)
    return parts


def check_request(graph: Graph, method: str, num_parts: int, seed: int) -> None:
    """Raise InputError if there can be no such partition of the graph."""
    if method not in METHODS:
        raise InputError(
            f"{graph.name}: there are no {method!r} parts; choose {', '.join(METHODS[:-1])} or "
            f"{METHODS[-1]}"
        )
    if not 1 <= num_parts <= graph.num_nodes:
        raise InputError(
            f"{graph.name}: cannot be cut into {num_parts:,} parts, since each has one of the "
            f"{graph.num_nodes:,} nodes at least; choose a number from 1 to {graph.num_nodes:,}"
        )
    if seed < 0:
        raise InputError(f"{graph.name}: the seed of its parts is {seed}; choose 0 or more")


def fill_empty(parts: np.ndarray, num_parts: int) -> None:
    """Move nodes to empty parts, in place, each from the part that is largest then."""
    sizes = np.bincount(parts, minlength=num_parts)
    empty = np.flatnonzero(sizes == 0)
    if len(empty) == 0:
        return
    order = np.argsort(parts, kind="stable")
    firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    before = np.arange(len(parts)) - firsts  # nodes of the same part before this one
    # Taking from the largest part again and again takes the nodes with most before them.
    moved = order[np.argsort(-before, kind="stable")[: len(empty)]]
    parts[moved] = empty
