"""Which nodes and edges the logit of a node of a graph rests on.

Only nodes from which the node can be reached within as many steps as the model has layers count.
They are numbered from 0, the node itself, by the steps that they are away. Edges have the weights
that they have in the whole graph, also where others are left out.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.graphs.features import for_model
from vigpipe.graphs.graph import Graph
from vigpipe.graphs.samplers.surroundings import Surroundings
from vigpipe.inference.explain.explanation import (
    EdgeShares,
    Explanation,
    Question,
)
from vigpipe.model.gnn.edges import Edges
from vigpipe.model.gnn.model import GraphModel
from vigpipe.ops.adjacency import Adjacency, Excerpt, Weighting

_MOST_NUMBERS = 1 << 30  # of features of the nodes that count


@dataclass(frozen=True)
class NodeInputs:
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
    def of(cls, graph: Graph, node: int, num_layers: int, dtype: torch.dtype) -> "NodeInputs":
        """Collect what so many layers can bring to a node."""
        nodes, steps, edges = Surroundings.of(graph, np.array([node]), num_layers)
        if len(nodes) * graph.num_features > _MOST_NUMBERS:
            raise InputError(
                f"--node: {len(nodes)} nodes within {num_layers} steps with {graph.num_features} "
                f"features each are too many to explain, at most {_MOST_NUMBERS} numbers; choose "
                "another node"
            )
        features: Any = graph.features
        rows = for_model(features[nodes], False)
        assert isinstance(rows, Tensor)
        return cls(nodes, steps, rows.to(dtype), edges)


class _Weighed(Edges):
    """The edges of one layer, with a factor on what each brings; one with the factor 0 is out."""

    def __init__(self, adjacency: Adjacency, factors: Tensor) -> None:
        super().__init__(adjacency)
        self.factors = factors  # (e,)

    def with_loops(self) -> Self:
        looped = copy(self)
        looped.adjacency = self.adjacency.with_loops()
        added = self.factors.new_ones(looped.adjacency.num_edges)
        looped.factors = added.index_put((self.adjacency.places_with_loops,), self.factors)
        return looped

    def sums(self, x: Tensor, weighting: Weighting, added: Tensor | None = None) -> Tensor:
        total = self.attention_sum(self.adjacency.weights(weighting, x.dtype).unsqueeze(1), x)
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
        return super().attention_sum(shares * self.factors.unsqueeze(1), x)


def explain_node(model: GraphModel, around: NodeInputs, question: Question) -> Explanation:
    """Explain a logit of a node; the model is in evaluation mode.

    An edge that is left out brings nothing: sums and attention do not count it, and weights and
    shares of the others stay; maxima are those of the others.
    """
    edges, num_layers = around.edges, model.num_layers
    with torch.no_grad():
        taken = _through(model, model.embed(around.x), [edges] * num_layers)
        logits = _logits(model, taken)
    measure = question.begun(logits)

    x, ones = around.x.clone().requires_grad_(), around.x.new_ones(edges.num_edges)
    factors = [ones.clone().requires_grad_() for _ in range(num_layers)]
    weighed = [_Weighed(edges, of_layer) for of_layer in factors]
    with_factors = _logits(model, _through(model, model.embed(x), weighed))
    of_nodes, *of_edges = measure.gradients(with_factors, [x, *factors])
    products = (of_nodes * around.x).sum(1).double().numpy()

    def without_node(number: int) -> Tensor:
        x = model.embed(around.x.index_fill(0, torch.tensor([number]), 0))
        return _logits(model, _through(model, x, [edges] * num_layers))

    steps = torch.from_numpy(around.steps)[edges.targets]

    def shares_of(layer: int, gradient: Tensor) -> EdgeShares:
        relevant = (steps < num_layers - layer).nonzero()[:, 0]  # what others bring gets nowhere

        def without(numbers: Tensor) -> Tensor:
            of_layer = _Weighed(edges, ones.index_fill(0, numbers, 0))
            following = [edges] * (num_layers - layer - 1)
            return _logits(model, _through(model, taken[layer], [of_layer, *following]))

        def without_edges(some: np.ndarray) -> Tensor:
            return torch.stack([without(number) for number in relevant[some].split(1)])

        gradients = gradient[relevant].double().numpy()
        return EdgeShares(
            layer,
            edges.indices[relevant].numpy(),
            edges.targets[relevant].numpy(),
            gradients,
            measure.drops_of_strongest(gradients, without_edges),
            float(measure.drops(without(relevant)[None])[0]),
        )

    with torch.no_grad():
        drops = measure.drops_of_strongest(
            products, lambda some: torch.stack([without_node(number) for number in some.tolist()])
        )
        shares = tuple(shares_of(layer, gradient) for layer, gradient in enumerate(of_edges))
    return Explanation(measure.target, logits, products, drops, shares)


def _through(model: GraphModel, x: Tensor, edges: Sequence[Edges | Excerpt]) -> list[Tensor]:
    """Take x through the last layers, one for each of the edges.

    Returns x, and what each layer makes of it.
    """
    taken = [x]
    for layer, of_layer in zip([*model.convs.values()][-len(edges) :], edges, strict=True):
        taken.append(layer(taken[-1], None, of_layer))
    return taken


def _logits(model: GraphModel, taken: Sequence[Tensor]) -> Tensor:
    """Return the node's logits, (C,)."""
    return model.read_out(taken[-1][:1], None)[0]
