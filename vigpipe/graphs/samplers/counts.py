"""Count how often nodes and edges come in sub-graphs that are drawn before the training."""

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from vigpipe.graphs.graph import Graph
from vigpipe.graphs.kept import Arrays, Form, keep, read_kept
from vigpipe.graphs.samplers.draws import DrawNodes, distinct_nodes

_VERSION = 1  # raise it when a sampler begins to draw other nodes for the same seed
_AT_ONCE = 64  # sub-graphs: one bit of a number for each
_NODES_AT_ONCE = 1 << 14  # bounds the memory for their edges


@dataclass(frozen=True, eq=False)
class Counts:
    """In how many sub-graphs nodes and edges came."""

    num_drawn: int  # S, number of sub-graphs
    of_nodes: np.ndarray  # C_v, (n,) int32
    of_edges: np.ndarray  # C_uv, (e,) int32
    seconds: float  # to draw and to count
    read_seconds: float | None = None  # to read them from a file; None if they are in no file
    was_read: bool = False  # whether an earlier process has counted, and this one read a file

    @cached_property
    def mean_nodes(self) -> float:
        return int(self.of_nodes.sum()) / self.num_drawn

    @cached_property
    def mean_edges(self) -> float:
        return int(self.of_edges.sum()) / self.num_drawn


def kept_counts(
    graph: Graph, name: str, draw_nodes: DrawNodes, coverage: int, seed: int, beside: Path | None
) -> Counts:
    """Read counts from a file, or count and write the file; for `beside` see `read_kept`.

    `name` must tell all that the draws depend on besides coverage, seed and graph.
    """
    name = f"{name}-{coverage}-{seed}-{graph.sha256}-{_VERSION}"
    nodes, edges = graph.num_nodes, graph.num_edges
    form = Form(
        f"counts of {nodes} nodes and {edges} edges",
        {
            "num_drawn": (np.int64, (1,)),
            "of_nodes": (np.int32, (nodes,)),
            "of_edges": (np.int32, (edges,)),
        },
        lambda arrays: _can_be(arrays, graph, coverage),
    )
    found = read_kept(name, beside, form)
    if found is not None:
        arrays, seconds, read_seconds = found
        num_drawn = int(arrays["num_drawn"].item())
        both = arrays["of_nodes"], arrays["of_edges"]
        return Counts(num_drawn, *both, seconds, read_seconds, was_read=True)
    counts = count(graph, draw_nodes, coverage, seed)
    arrays = {
        "num_drawn": np.array([counts.num_drawn]),
        "of_nodes": counts.of_nodes,
        "of_edges": counts.of_edges,
    }
    return replace(counts, read_seconds=keep(name, beside, form, arrays, counts.seconds))


def count(graph: Graph, draw_nodes: DrawNodes, coverage: int, seed: int) -> Counts:
    """Draw sub-graphs, as those of epoch 0, until each node came `coverage` times on average.

    A number of 64 bits says which of 64 sub-graphs have a node, so that one pass over the edges
    counts for all of them.
    """
    began = time.perf_counter()
    of_nodes = np.zeros(graph.num_nodes, dtype=np.int32)
    of_edges = np.zeros(graph.num_edges, dtype=np.int32)
    num_drawn, num_nodes, most = 0, 0, coverage * graph.num_nodes
    while num_nodes <= most:
        which = np.zeros(graph.num_nodes, dtype=np.uint64)
        for bit in range(_AT_ONCE):
            nodes = distinct_nodes(draw_nodes, seed, 0, num_drawn)
            which[nodes] |= np.uint64(1 << bit)
            num_drawn, num_nodes = num_drawn + 1, num_nodes + len(nodes)
            if num_nodes > most:
                break
        of_nodes += np.bitwise_count(which)
        _count_edges(graph, which, of_edges)
    return Counts(num_drawn, of_nodes, of_edges, time.perf_counter() - began)


def _count_edges(graph: Graph, which: np.ndarray, of_edges: np.ndarray) -> None:
    """Count for each edge the sub-graphs with both ends, of which `which` has bits, (n,) uint64."""
    came = np.flatnonzero(which)
    for first in range(0, len(came), _NODES_AT_ONCE):
        nodes = came[first : first + _NODES_AT_ONCE]
        rows, edges = graph.edges_into(nodes)
        both = which[graph.indices[edges]]
        both &= np.repeat(which[nodes], np.diff(rows))
        of_edges[edges] += np.bitwise_count(both)


def _can_be(arrays: Arrays, graph: Graph, coverage: int) -> bool:
    """Whether any draws could have led to these counts."""
    num_drawn, of_nodes, of_edges = (arrays[name] for name in ("num_drawn", "of_nodes", "of_edges"))
    total, most = int(of_nodes.sum()), coverage * graph.num_nodes
    if not most < total <= most + graph.num_nodes or not 1 <= num_drawn.item() <= total:
        return False
    if of_nodes.min() < 0 or of_nodes.max() > num_drawn.item() or (of_edges < 0).any():
        return False
    of_targets = np.repeat(of_nodes, np.diff(graph.indptr))
    return bool((of_edges <= np.minimum(of_targets, of_nodes[graph.sources()])).all())
