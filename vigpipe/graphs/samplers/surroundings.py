"""The nodes that a model's logits of some nodes can depend on, and the edges between them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vigpipe.graphs.graph import Graph, in_rows
from vigpipe.graphs.samplers.aggregation import degrees_of
from vigpipe.ops.adjacency import Excerpt


class Surroundings(NamedTuple):
    """Those from which some nodes can be reached within as many steps as a model has layers."""

    nodes: np.ndarray  # (m,) int64, their numbers in the graph, the nodes themselves first
    steps: np.ndarray  # (m,) int64, how many steps each is away
    # Those that end in a node that is fewer steps away than the model has layers, with the weights
    # that they have in the whole graph.
    edges: Excerpt

    @classmethod
    def of(cls, graph: Graph, nodes: np.ndarray, num_layers: int) -> "Surroundings":
        """Collect what so many layers can bring to some nodes, each of which is there once."""
        steps_of = np.full(graph.num_nodes, -1)
        steps_of[nodes] = 0
        layers, ends, edges, origins = [nodes], [], [], []
        for step in range(1, num_layers + 1):
            rows, numbers = graph.edges_into(layers[-1])
            ends.append(np.repeat(layers[-1], np.diff(rows)))
            edges.append(numbers)
            sources = np.asarray(graph.indices[numbers])
            origins.append(sources)
            new = np.unique(sources[steps_of[sources] < 0])
            steps_of[new] = step
            layers.append(new)
        found = np.concatenate(layers)
        of_edges = (np.concatenate(parts) for parts in (edges, origins, ends))
        excerpt = _excerpt(graph, found, *of_edges)
        return cls(found, steps_of[found], excerpt)


@dataclass(frozen=True, eq=False, kw_only=True)
class CutGraph(Graph):
    """A graph of which only the surroundings of some nodes are left; these come first."""

    num_chosen: int
    excerpt: Excerpt  # its edges


def cut_to(graph: Graph, nodes: np.ndarray, num_layers: int) -> CutGraph:
    """Leave out what so many layers cannot bring to some nodes, each of which is there once."""
    around, _, edges = Surroundings.of(graph, nodes, num_layers)
    names, features = graph.node_names, graph.features
    of_nodes: Any = features[around]
    return CutGraph(
        name=graph.name,
        indptr=edges.indptr.numpy(),
        indices=edges.indices.numpy(),
        features=of_nodes,
        labels=graph.labels[around],
        split=graph.split[around],
        class_names=graph.class_names,
        node_names=None if names is None else tuple(names[node] for node in around.tolist()),
        feature_weights=graph.feature_weights,
        numbers=graph.numbers_of(around),
        edge_weights=None if edges.edge_weights is None else edges.edge_weights.numpy(),
        choices=graph.choices,
        notes=graph.notes,
        num_chosen=len(nodes),
        excerpt=edges,
    )


def _excerpt(
    graph: Graph, nodes: np.ndarray, edges: np.ndarray, sources: np.ndarray, targets: np.ndarray
) -> Excerpt:
    """Number the nodes of edges anew, by their places among `nodes`."""
    place = np.full(graph.num_nodes, -1)
    place[nodes] = np.arange(len(nodes))
    ends = place[sources], place[targets]
    *rows, weights = in_rows(*ends, len(nodes), graph.weights_of(edges))
    degrees = (of_nodes[nodes] for of_nodes in degrees_of(graph))
    indptr, indices, plain, looped = map(torch.from_numpy, (*rows, *degrees))
    of_edges = None if weights is None else torch.from_numpy(weights)
    return Excerpt(indptr, indices, None, plain, looped, of_edges)
