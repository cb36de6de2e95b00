"""The edges of one graph in rows, and what follows from them alone."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vigpipe.ops.transpose import is_symmetric, transpose

Weighting = Literal["ones", "mean", "gcn"]


class Factors(NamedTuple):
    """What a sum over edges multiplies by; None stands for ones."""

    of_edges: Tensor | None = None  # (e,), or (e, H) with a factor for each of H heads
    of_sources: Tensor | None = None  # (n,)
    of_targets: Tensor | None = None  # (m,)


class Ends(NamedTuple):
    """What gives an edge from j to i the score leaky_relu(of_sources[j] + of_targets[i])."""

    of_sources: Tensor  # (n, H)
    of_targets: Tensor  # (m, H)
    slope: float


class Adjacency:
    """Compressed sparse rows of a graph: row v lists where the edges that end in v come from.

    What is derived from the edges is computed at its first use and kept.

    Args:
        indptr: (m + 1,) int64; the edges that end in node v have the numbers indptr[v] ...
            indptr[v + 1] - 1.
        indices: (e,) int64, the node that each edge comes from, ascending for each v. An edge may
            be there once only; there may be self-loops.
        num_sources: n, number of nodes that edges may come from; by default m, all nodes. If there
            are more, the first m of them are the nodes that edges end in.
        edge_weights: (e,) above 0, how much each edge counts; None if all count 1.

    Raises:
        ValueError: these are not the rows of a graph.
    """

    is_sampled = False  # whether each edge has a factor that makes up for others

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        num_sources: int | None = None,
        edge_weights: Tensor | None = None,
    ) -> None:
        self._keep(indptr, indices, num_sources, edge_weights)
        if edge_weights is not None and len(edge_weights) != self.num_edges:
            raise ValueError(f"{len(edge_weights)} weights for {self.num_edges} edges")
        if {indptr.dtype, indices.dtype} != {torch.int64}:
            raise ValueError(f"edges are int64 (got {indptr.dtype} and {indices.dtype})")
        if self.num_targets < 0 or int(indptr[0]) != 0 or int(indptr[-1]) != self.num_edges:
            raise ValueError(f"rows begin at 0 and end at the number of edges, {self.num_edges}")
        if self.num_edges == 0:
            return
        least, most = (int(end) for end in indices.aminmax())
        if least < 0 or most >= self.num_sources or bool((indptr.diff() < 0).any()):
            raise ValueError(
                f"edges come from nodes {least} to {most} of {self.num_sources}, in rows that "
                "must not have a negative length"
            )

    def _keep(
        self,
        indptr: Tensor,
        indices: Tensor,
        num_sources: int | None,
        edge_weights: Tensor | None = None,
    ) -> None:
        self.indptr, self.indices, self.edge_weights = indptr, indices, edge_weights
        self.num_targets, self.num_edges = len(indptr) - 1, len(indices)
        self.num_sources = self.num_targets if num_sources is None else num_sources
        self._logs: dict[torch.dtype, Tensor] = {}
        self._weights: dict[tuple[Weighting, torch.dtype, bool], Tensor] = {}
        self._factors: dict[tuple[Weighting, torch.dtype], tuple[Tensor | None, ...]] = {}

    @classmethod
    def unchecked(
        cls,
        indptr: Tensor,
        indices: Tensor,
        num_sources: int,
        edge_weights: Tensor | None = None,
    ) -> "Adjacency":
        """Return a graph of rows that are known to be right."""
        adjacency = cls.__new__(cls)
        adjacency._keep(indptr, indices, num_sources, edge_weights)
        return adjacency

    @cached_property
    def targets(self) -> Tensor:
        """The node that each edge ends in, (e,) int64."""
        nodes = torch.arange(self.num_targets, device=self.indptr.device)
        return nodes.repeat_interleave(self.in_degrees, output_size=self.num_edges)

    @cached_property
    def in_degrees(self) -> Tensor:
        """Number of edges that end in each node, (m,) int64."""
        return self.indptr.diff()

    @cached_property
    def transposed(self) -> "Adjacency":
        """The graph with every edge turned round; the graph itself if that is the same."""
        edges, device = (self.indptr.cpu(), self.indices.cpu()), self.indptr.device
        goes_both_ways = self.num_sources == self.num_targets and is_symmetric(*edges)
        if self.edge_weights is None:
            if goes_both_ways:
                return self
            indptr, indices = transpose(*edges, self.num_sources)
            return Adjacency.unchecked(indptr.to(device), indices.to(device), self.num_targets)
        indptr, turned = (
            tensor.to(device) for tensor in transpose(*edges, self.num_sources, numbers=True)
        )
        weights = self.edge_weights[turned]
        if goes_both_ways and torch.equal(weights, self.edge_weights):
            return self
        return Adjacency.unchecked(indptr, self.targets[turned], self.num_targets, weights)

    @cached_property
    def turned_edges(self) -> Tensor:
        """The number that each edge of the transposed graph has in this one, (e,) int64."""
        edges = self.indptr.cpu(), self.indices.cpu()
        return transpose(*edges, self.num_sources, numbers=True)[1].to(self.indptr.device)

    def with_loops(self) -> "Adjacency":
        """Return the graph with a self-loop at every node; those that it has stay.

        The loops that are added have the weight 1.
        """
        return self._with_loops

    @cached_property
    def _with_loops(self) -> "Adjacency":
        indptr, indices, positions = self._looped()
        weights = _among_ones(self.edge_weights, positions, len(indices))
        return Adjacency(indptr, indices, self.num_sources, weights)

    @cached_property
    def places_with_loops(self) -> Tensor:
        """The number that each edge has in `with_loops`, (e,) int64."""
        return self._looped()[2]

    def _looped(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows and sources with self-loops, and where in them the edges of the graph are."""
        loops = self.indices == self.targets
        is_missing = torch.ones(self.num_targets, dtype=torch.bool, device=self.indptr.device)
        is_missing[self.targets[loops]] = False
        added = torch.zeros_like(self.indptr)  # self-loops added to the rows before
        torch.cumsum(is_missing, 0, out=added[1:])
        # An edge moves by the loops of earlier rows, and by that of its own row if it comes after.
        is_after = is_missing[self.targets] & (self.indices > self.targets)
        positions = torch.arange(self.num_edges, device=self.indptr.device)
        positions += added[self.targets] + is_after
        indptr = self.indptr + added
        nodes = torch.arange(self.num_targets, device=self.indptr.device)
        indices = nodes.repeat_interleave(indptr.diff())
        indices[positions] = self.indices
        return indptr, indices, positions

    def weights(self, weighting: Weighting, dtype: torch.dtype, transposed: bool = False) -> Tensor:
        """Return constant weights of all edges, (e,), computed in float64.

        Args:
            weighting: `ones`; `mean`, 1 / d_i for an edge that ends in node i, which has d_i edges
                that end in it; `gcn`, 1 / sqrt(d_i d_j) for an edge from j to i, 0 where that is
                not finite (Kipf & Welling 2017, arXiv:1609.02907, equation 2). Where edges have
                weights, these are multiplied by that of the edge, and d_i is the sum of the weights
                of the edges that end in node i.
            dtype: type of the weights.
            transposed: in the order of the transposed graph's edges.
        """
        key = (weighting, dtype, transposed)
        if key not in self._weights:
            self._weights[key] = (
                self.weights(weighting, dtype)[self.turned_edges]
                if transposed
                else self._weights_in_float64(weighting).to(dtype)
            )
        return self._weights[key]

    def _weights_in_float64(self, weighting: Weighting) -> Tensor:
        of_sources, of_targets = self._factors_of_nodes(weighting)
        ones = torch.ones(self.num_edges, dtype=torch.float64, device=self.indptr.device)
        weights = ones if of_targets is None else of_targets[self.targets]
        weights = weights if of_sources is None else weights * of_sources[self.indices]
        return weights if self.edge_weights is None else weights * self.edge_weights

    def factors(
        self, weighting: Weighting, dtype: torch.dtype, transposed: bool = False
    ) -> Factors:
        """Return factors whose product is the weight of an edge; see `weights`."""
        if self.is_sampled:
            return Factors(of_edges=self.weights(weighting, dtype, transposed))
        of_edges = (self.transposed if transposed else self).edge_weights
        of_edges = None if of_edges is None else of_edges.to(dtype)
        of_nodes = self._kept_factors_of_nodes(weighting, dtype)
        return Factors(of_edges, *(reversed(of_nodes) if transposed else of_nodes))

    def log_weights(self, dtype: torch.dtype) -> Tensor | None:
        """Return the logarithms of the weights of edges, (e,); None if all are 1."""
        if self.edge_weights is not None and dtype not in self._logs:
            self._logs[dtype] = self.edge_weights.double().log().to(dtype)
        return self._logs.get(dtype)

    def _kept_factors_of_nodes(
        self, weighting: Weighting, dtype: torch.dtype
    ) -> tuple[Tensor | None, ...]:
        key = (weighting, dtype)
        if key not in self._factors:
            of_nodes = self._factors_of_nodes(weighting)
            self._factors[key] = tuple(None if t is None else t.to(dtype) for t in of_nodes)
        return self._factors[key]

    def _factors_of_nodes(self, weighting: Weighting) -> tuple[Tensor | None, Tensor | None]:
        """Return what a source and a target multiply by, in float64."""
        if weighting == "ones":
            return None, None
        degrees = self.degrees.double()
        if weighting == "mean":
            return None, degrees.reciprocal().masked_fill_(degrees == 0, 0)[: self.num_targets]
        if len(degrees) != self.num_sources:
            raise ValueError("the degrees of all sources are known where these are the targets")
        roots = degrees.rsqrt().masked_fill_(degrees == 0, 0)
        return roots, roots[: self.num_targets]

    @cached_property
    def degrees(self) -> Tensor:
        """How much the edges weigh together that end in each node, (m,) int64, or float64.

        Of an excerpt they are known of all sources, (n,).
        """
        if self.edge_weights is None:
            return self.in_degrees
        weights = self.edge_weights.double()
        if not self.num_edges:
            return weights.new_zeros(self.num_targets)
        return torch.segment_reduce(weights, "sum", offsets=self.indptr)

    def rows(self, start: int, end: int) -> "Rows":
        """Return the edges that end in nodes start ... end - 1, from any node.

        Degrees, self-loops and weights are those of the whole graph.
        """
        return Rows(self, start, end)

    def own(self, x: Tensor) -> Tensor:
        """Return the rows of x, (n, ...), that belong to the targets: (m, ...)."""
        return x if self.num_targets == self.num_sources else x[: self.num_targets]

    def of_layer(self, index: int) -> "Adjacency":
        """Return the edges of a layer, the first of which has index 0: all take the same edges."""
        return self

    def suits(self, num_nodes: int, layer: int, num_layers: int) -> bool:
        """Tell whether a layer of a model, which takes so many nodes, can use these edges."""
        return {self.num_targets, self.num_sources} == {num_nodes}

    def to(self, device: torch.device | str) -> "Adjacency":
        """Return the graph on a device; the graph itself if it is there."""
        if self.indptr.device == torch.device(device):
            return self
        edges = self.indptr.to(device), self.indices.to(device)
        return Adjacency(*edges, self.num_sources, _on(device, self.edge_weights))


class Rows(Adjacency):
    """The edges that end in nodes start ... end - 1 of a graph; target 0 here is node `start`."""

    def __init__(self, whole: Adjacency, start: int, end: int) -> None:
        self.whole, self.start, self.end = whole, start, end
        first, last = (int(whole.indptr[node]) for node in (start, end))
        indptr = whole.indptr[start : end + 1] - first
        self._edges = slice(first, last)
        weights = None if whole.edge_weights is None else whole.edge_weights[self._edges]
        super().__init__(indptr, whole.indices[self._edges], whole.num_sources, weights)
        self.is_sampled = whole.is_sampled

    def with_loops(self) -> "Rows":
        return self.whole.with_loops().rows(self.start, self.end)

    def _weights_in_float64(self, weighting: Weighting) -> Tensor:
        return self.whole.weights(weighting, torch.float64)[self._edges]

    def _factors_of_nodes(self, weighting: Weighting) -> tuple[Tensor | None, Tensor | None]:
        of_sources, of_targets = self.whole._kept_factors_of_nodes(weighting, torch.float64)
        return of_sources, None if of_targets is None else of_targets[self.start : self.end]

    def rows(self, start: int, end: int) -> "Rows":
        return self.whole.rows(self.start + start, self.start + end)

    def own(self, x: Tensor) -> Tensor:
        return x[self.start : self.end]

    def to(self, device: torch.device | str) -> "Adjacency":
        return self.whole.to(device).rows(self.start, self.end)


class Excerpt(Adjacency):
    """Edges from a larger graph, with the weights that they have there.

    The `degrees` of the sources are those in the larger graph, (n,); with a self-loop at every node
    they are `loop_degrees`.

    If the edges were sampled, weights make up for the others: each is that of the larger graph,
    times a factor of the edge, (e,) float64. The factors are such that a sum over the sampled edges
    has the expected value of the sum over all edges. The self-loops of `with_loops` have the factor
    1. The maximum and attention have no such factors, and take the sampled edges as if there were
    no others. Where edges have weights, a self-loop of the larger graph may have been left out by
    sampling: `loop_weights`, (m,), are those of the targets, 1 where there is none.
    """

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        edge_factors: Tensor | None,
        degrees: Tensor,
        loop_degrees: Tensor,
        edge_weights: Tensor | None = None,
        loop_weights: Tensor | None = None,
    ) -> None:
        super().__init__(indptr, indices, len(degrees), edge_weights)
        self.loop_weights = loop_weights
        if edge_factors is not None and len(edge_factors) != self.num_edges:
            raise ValueError(f"{len(edge_factors)} factors for {self.num_edges} edges")
        self.is_sampled = edge_factors is not None
        self.edge_factors, self.degrees, self.loop_degrees = edge_factors, degrees, loop_degrees

    @cached_property
    def _with_loops(self) -> "Excerpt":
        indptr, indices, positions = self._looped()
        factors = self.edge_factors
        if factors is not None:
            factors = factors.masked_fill(self.indices == self.targets, 1.0)
        factors, weights = (
            _among_ones(values, positions, len(indices)) for values in (factors, self.edge_weights)
        )
        if self.loop_weights is not None and weights is not None:
            targets = torch.arange(self.num_targets, device=indptr.device)
            is_loop = indices == targets.repeat_interleave(indptr.diff())
            weights = weights.masked_scatter(is_loop, self.loop_weights)
        return Excerpt(indptr, indices, factors, self.loop_degrees, self.loop_degrees, weights)

    def _weights_in_float64(self, weighting: Weighting) -> Tensor:
        weights = super()._weights_in_float64(weighting)
        return weights if self.edge_factors is None else self.edge_factors * weights

    def to(self, device: torch.device | str) -> "Excerpt":
        if self.indptr.device == torch.device(device):
            return self
        return Excerpt(
            self.indptr.to(device),
            self.indices.to(device),
            _on(device, self.edge_factors),
            self.degrees.to(device),
            self.loop_degrees.to(device),
            _on(device, self.edge_weights),
            _on(device, self.loop_weights),
        )


class Layered:
    """Edges of their own for every layer of a model.

    Each layer makes features of fewer nodes, which are the first of those that it takes.
    """

    def __init__(self, layers: Sequence[Adjacency]) -> None:
        self.layers = tuple(layers)
        self.num_sources, self.num_targets = layers[0].num_sources, layers[-1].num_targets
        self.num_edges = sum(layer.num_edges for layer in layers)
        for i, (layer, following) in enumerate(pairwise(layers)):
            if layer.num_targets != following.num_sources:
                raise ValueError(
                    f"layer {i} makes {layer.num_targets} nodes, and the next one takes "
                    f"{following.num_sources}"
                )

    def of_layer(self, index: int) -> Adjacency:
        return self.layers[index]

    def suits(self, num_nodes: int, layer: int, num_layers: int) -> bool:
        if num_layers != len(self.layers):
            return False
        return self.layers[layer].num_sources <= num_nodes <= self.num_sources

    def to(self, device: torch.device | str) -> "Layered":
        return Layered([layer.to(device) for layer in self.layers])


def _among_ones(values: Tensor | None, positions: Tensor, number: int) -> Tensor | None:
    """Put values, (e,), to some positions among so many ones; None for none."""
    return None if values is None else values.new_ones(number).index_put((positions,), values)


def _on(device: torch.device | str, values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to(device)
