"""How the layers of a model weight the edges of the whole graph."""

from typing import NamedTuple

import numpy as np

from vigpipe.graphs.graph import Graph
from vigpipe.ops.adjacency import Weighting

_WEIGHTINGS: dict[str, Weighting] = {"gcn": "gcn", "gcn2": "gcn", "gin": "ones"}


def weighting_of(model: str) -> Weighting:
    """Return the weights of a model's sums; `mean` for models that take no sums."""
    return _WEIGHTINGS.get(model, "mean")


class Degrees(NamedTuple):
    """How many edges end in every node of a graph, (n,) int64 each."""

    plain: np.ndarray
    looped: np.ndarray  # with a self-loop at every node


def degrees_of(graph: Graph) -> Degrees:
    """Count the edges that end in every node."""
    plain = np.diff(graph.indptr)
    looped = plain + 1
    looped[graph.loops] -= 1
    return Degrees(plain, looped)


def squared_columns(
    graph: Graph, weighting: Weighting, degrees: np.ndarray, *, with_loops: bool
) -> np.ndarray:
    """Return ||A[:, u]||² of every node u, (n,) float64.

    A consists of the weights of `weighting`, see `Adjacency.weights`, which are computed from the
    degrees, for `gcn` those with self-loops. The graph's own self-loops belong to A on request.
    """
    sources, targets = graph.sources(), graph.targets()
    inverses = 1 / np.maximum(degrees, 1)
    if weighting == "ones":
        squares = np.ones(graph.num_edges)
    elif weighting == "mean":
        squares = (inverses**2)[targets]
    else:
        squares = inverses[targets] * inverses[sources]
    if not with_loops:
        squares[sources == targets] = 0
    return np.bincount(sources, squares, minlength=graph.num_nodes)
