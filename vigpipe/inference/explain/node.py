"""Which nodes and edges the logit of a node of a graph rests on.

Only nodes from which the node can be reached in as many steps as the model has layers count. They
are numbered from 0, the node itself, by the steps that they are away. Edges have the weights that
they have in the whole graph, also where others are left out.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.graphs.features import for_model
from vigpipe.graphs.graph import Graph
from vigpipe.graphs.samplers.aggregation import degrees_of
from vigpipe.inference.explain.explanation import (
    EdgeShares,
    Explanation,
    gradients_of,
    likeliest,
    measure_drops,
)
from vigpipe.model.gnn.edges import Edges
from vigpipe.model.gnn.model import GraphModel
from vigpipe.ops.adjacency import Adjacency, Excerpt, Weighting

_MOST_NUMBERS = 1 << 30  # of features of the nodes that count


@dataclass(frozen=True)
class Surroundings:
    """The nodes that the logits of a node can depend on, and the edges between them.

    Attributes:
        nodes: their numbers in the graph, the node itself first, (m,) int64.
        steps: how many steps each is away, (m,) int64.
        x: their features, (m, features).
        edges: those that end in a node that is fewer steps away than the model has layers.
    """

    nodes: np.ndarray
    steps: np.ndarray
    x: Tensor
    edges: Excerpt

    @classmethod
    def of(cls, graph: Graph, node: int, num_layers: int, dtype: torch.dtype) -> "Surroundings":
        """Collect what so many layers can bring to a node."""
        steps_of = np.full(graph.num_nodes, -1)
        steps_of[node] = 0
        layers, ends, sources = [np.array([node])], [], []
        for step in range(1, num_layers + 1):
            rows, numbers = graph.edges_into(layers[-1])
            origins = np.asarray(graph.indices[numbers])
            ends.append(np.repeat(layers[-1], np.diff(rows)))
            sources.append(origins)
            new = np.unique(origins[steps_of[origins] < 0])
            steps_of[new] = step
            layers.append(new)
        nodes = np.concatenate(layers)
        if len(nodes) * graph.num_features > _MOST_NUMBERS:
            raise InputError(
                f"--node: {len(nodes)} nodes within {num_layers} steps with {graph.num_features} "
                f"features each are too many to explain, at most {_MOST_NUMBERS} numbers; choose "
                "another node"
            )
        features: Any = graph.features
        rows = for_model(features[nodes], False)
        assert isinstance(rows, Tensor)
        adjacency = _excerpt(graph, nodes, np.concatenate(sources), np.concatenate(ends))
        return cls(nodes, steps_of[nodes], rows.to(dtype), adjacency)


def _excerpt(graph: Graph, nodes: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> Excerpt:
    """Number the nodes anew, and sort the edges between them by their ends."""
    place = np.full(graph.num_nodes, -1)
    place[nodes] = np.arange(len(nodes))
    order = np.lexsort((place[sources], place[targets]))
    counts = np.bincount(place[targets], minlength=len(nodes))
    arrays = np.append(0, counts.cumsum()), place[sources][order]
    degrees = (torch.from_numpy(counts[nodes]) for counts in degrees_of(graph))
    indptr, indices = map(torch.from_numpy, arrays)
    return Excerpt(indptr, indices, None, *degrees)


class _Weighed(Edges):
    """The edges of one layer, with a factor on what each brings; one with the factor 0 is out."""

    def __init__(self, adjacency: Adjacency, factors: Tensor) -> None:
        super().__init__(adjacency, fused=False)
        self.factors = factors  # (e,)

    def with_loops(self) -> Self:
        looped = copy(self)
        looped.adjacency = self.adjacency.with_loops()
        # Loops that are added have the factor 1.
        ends = [a.targets * a.num_sources + a.indices for a in (looped.adjacency, self.adjacency)]
        factors = self.factors.new_ones(len(ends[0]))
        looped.factors = factors.index_put((torch.searchsorted(*ends),), self.factors)
        return looped

    def sums(self, x: Tensor, weighting: Weighting, added: Tensor | None = None) -> Tensor:
        weights = self.adjacency.weights(weighting, x.dtype) * self.factors
        total = self._summed(weights.unsqueeze(1) * x[self.adjacency.indices])
        return total if added is None else total + added

    def own_and_mean(self, both: Tensor) -> Tensor:
        sent, own = both.chunk(2, dim=1)
        return self.sums(sent, "mean", self.own(own))

    def maximum(self, x: Tensor) -> Tensor:
        brought = self.factors.unsqueeze(1) * x[self.adjacency.indices]
        brought = brought.masked_fill(self.factors.unsqueeze(1) == 0, -torch.inf)
        ends = self.adjacency.targets.unsqueeze(1).expand_as(brought)
        none = x.new_full((self.num_targets, x.shape[1]), -torch.inf)
        most = none.scatter_reduce(0, ends, brought, "amax")
        return most.masked_fill(most.isneginf(), 0)  # as of nodes that no edge ends in

    def attention_sum(self, shares: Tensor, x: Tensor) -> Tensor:
        weights = (shares * self.factors.unsqueeze(1)).unsqueeze(2)
        by_heads = x.unflatten(1, (shares.shape[1], -1))
        return self._summed((weights * by_heads[self.adjacency.indices]).flatten(1))

    def _summed(self, brought: Tensor) -> Tensor:
        total = brought.new_zeros(self.num_targets, brought.shape[1])
        return total.index_add(0, self.adjacency.targets, brought)


class _InLayers(Edges):
    """The same edges in all layers, with factors of their own in some layers."""

    def __init__(self, adjacency: Adjacency, factors: Mapping[int, Tensor]) -> None:
        super().__init__(adjacency)
        self._factors = factors

    def of_layer(self, index: int) -> Edges:
        if index in self._factors:
            return _Weighed(self.adjacency, self._factors[index])
        return self


def explain_node(
    model: GraphModel, around: Surroundings, target: int | None, most: int
) -> Explanation:
    """Explain the logit of a class of a node, by default the likeliest.

    So many nodes, and edges of each layer, are left out alone, those with the largest gradient. An
    edge that is left out brings nothing: sums and attention do not count it, and weights and shares
    of the others stay; maxima are those of the others.
    """
    adjacency, num_layers = around.edges, model.num_layers

    def logits(x: Tensor, factors: Mapping[int, Tensor]) -> Tensor:
        return model(x, None, _InLayers(adjacency, factors))[0]

    with torch.no_grad():
        of_classes = logits(around.x, {})
    likely = likeliest(of_classes)
    target = likely if target is None else target
    logit = float(of_classes[target])

    x, ones = around.x.clone().requires_grad_(), around.x.new_ones(adjacency.num_edges)
    factors = {layer: ones.clone().requires_grad_() for layer in range(num_layers)}
    of_nodes, *of_edges = gradients_of(logits(x, factors)[target], [x, *factors.values()])
    products = (of_nodes * around.x).sum(1).double().numpy()

    def without_nodes(some: np.ndarray) -> Tensor:
        changed = (around.x.index_fill(0, torch.tensor([i]), 0) for i in some)
        return torch.stack([logits(x, {})[target] for x in changed])

    steps = torch.from_numpy(around.steps)[adjacency.targets]

    def shares_of(layer: int, gradient: Tensor) -> EdgeShares:
        counting = (steps < num_layers - layer).nonzero()[:, 0]  # the others cannot matter

        def without(numbers: Tensor) -> Tensor:
            return logits(around.x, {layer: ones.index_fill(0, numbers, 0)})[target]

        def without_edges(some: np.ndarray) -> Tensor:
            return torch.stack([without(numbers) for numbers in counting[some].split(1)])

        gradients = gradient[counting].double().numpy()
        return EdgeShares(
            layer,
            adjacency.indices[counting].numpy(),
            adjacency.targets[counting].numpy(),
            gradients,
            measure_drops(logit, gradients, most, without_edges),
            logit - float(without(counting)),
        )

    with torch.no_grad():
        drops = measure_drops(logit, products, most, without_nodes)
        edges = tuple(shares_of(layer, gradient) for layer, gradient in enumerate(of_edges))
    return Explanation(target, of_classes, products, drops, edges)
