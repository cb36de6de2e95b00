"""What a rank has of a sub-graph: all of it, some rows, or a part with its halo."""

from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vigpipe.config.halo import HaloKind
from vigpipe.graphs.samplers.sampler import SubGraph
from vigpipe.graphs.split.halo import Halo, HaloEdges, make_halo
from vigpipe.graphs.split.mixed import MixedEdges
from vigpipe.graphs.split.stale import StaleHalos
from vigpipe.graphs.split.travelling import TravellingEdges
from vigpipe.model.gnn.edges import Edges
from vigpipe.ops.adjacency import Adjacency, Layered
from vigpipe.parallel.shards import Shards


class Share(NamedTuple):
    """What a rank has of a sub-graph.

    Attributes:
        nodes: (b,) int64, those of the rank.
        edges: what the model gets for the edges.
        num_targets: how many of the nodes, the first ones, get logits.
        weights: as in `SubGraph`, of the rank's nodes.
    """

    nodes: np.ndarray
    edges: Adjacency | Layered | Edges
    num_targets: int
    weights: np.ndarray | None = None


class Sharing(Protocol):
    """How the ranks of a replica share its sub-graphs.

    Attributes:
        is_alone: whether there is one rank, which has all of them.
    """

    is_alone: bool

    def own(self, nodes: np.ndarray) -> np.ndarray:
        """Choose the rank's nodes from those of a sub-graph."""
        ...

    def most(self, num_nodes: int) -> int:
        """Return how many nodes the rank has of a sub-graph that has so many, at most."""
        ...

    def share(
        self, sub_graph: SubGraph, device: torch.device, features: Tensor | None = None
    ) -> Share:
        """Choose what the rank has of a sub-graph.

        Args:
            sub_graph: the sub-graph, on the host.
            device: where the edges are to be.
            features: of the rank's nodes, if they are the same tensor in every call.
        """
        ...

    def at_step(self, share: Share, step: int, device: torch.device) -> Share:
        """Return what the rank takes a step of training with, where that depends on the step."""
        ...

    def finish(self) -> None:
        """Wait for what other ranks still send."""
        ...


class Alone:
    """One rank, which has all."""

    is_alone = True

    def own(self, nodes: np.ndarray) -> np.ndarray:
        """Return all nodes."""
        return nodes

    def most(self, num_nodes: int) -> int:
        """Return the number of nodes."""
        return num_nodes

    def share(
        self, sub_graph: SubGraph, device: torch.device, features: Tensor | None = None
    ) -> Share:
        """Return the sub-graph, with its edges on the device."""
        edges = sub_graph.adjacency.to(device)
        return Share(sub_graph.nodes, edges, edges.num_targets, sub_graph.weights)

    def at_step(self, share: Share, step: int, device: torch.device) -> Share:
        """Return the same."""
        return share

    def finish(self) -> None:
        """Do nothing."""


class ByRows:
    """Ranks with some rows each, or columns of all: --split mixed.

    Args:
        shards: the ranks.
        chunks: in how many chunks of nodes sums leave, where ranks send.
        travels: whether a rank keeps only the edges of its own nodes.
        fused: use the fused kernels where there are any.
    """

    is_alone = False

    def __init__(self, shards: Shards, *, chunks: int, travels: bool, fused: bool) -> None:
        self._shards, self._chunks, self._travels = shards, chunks, travels
        self._fused = fused

    def own(self, nodes: np.ndarray) -> np.ndarray:
        """Choose neighbouring ones, an m-th of all."""
        return nodes[self._shards.own(len(nodes))]

    def most(self, num_nodes: int) -> int:
        """Return an m-th of the nodes."""
        return self._shards.count(num_nodes)

    def share(
        self, sub_graph: SubGraph, device: torch.device, features: Tensor | None = None
    ) -> Share:
        """Choose some rows of a sub-graph; all edges stay, unless they travel."""
        nodes, adjacency, weights = sub_graph
        assert isinstance(adjacency, Adjacency)  # `GraphJob.check` has refused others
        edges = self._edges(adjacency, device, features)
        weights = None if weights is None else weights[self._shards.own(len(nodes))]
        own = self.own(nodes)
        return Share(own, edges, len(own), weights)

    def _edges(
        self, adjacency: Adjacency, device: torch.device, features: Tensor | None
    ) -> MixedEdges:
        shards, fused = self._shards, self._fused
        if self._travels:
            return TravellingEdges(adjacency, shards, device, features, fused=fused)
        edges = adjacency.to(device)
        return MixedEdges(edges, shards, features, chunks=self._chunks, fused=fused)

    def at_step(self, share: Share, step: int, device: torch.device) -> Share:
        """Return the same."""
        return share

    def finish(self) -> None:
        """Do nothing."""


class ByParts:
    """Ranks with parts of the whole graph: --split halo.

    Args:
        shards: the ranks.
        owners: (n,) int64, which of them has a node.
        kind: what they get of one another's rows.
        seed: of the rows that are sampled.
        fused: use the fused kernels where there are any.
    """

    is_alone = False

    def __init__(
        self, shards: Shards, owners: np.ndarray, kind: HaloKind, seed: int, *, fused: bool
    ) -> None:
        self._shards, self._owners, self._kind, self._seed = shards, owners, kind, seed
        self._fused = fused
        self._stale = StaleHalos() if kind.method == "stale" else None
        self._halo: Halo | None = None  # of the whole graph, on the host

    @cached_property
    def _own(self) -> np.ndarray:
        return np.flatnonzero(self._owners == self._shards.place)

    def own(self, nodes: np.ndarray) -> np.ndarray:
        """Choose the nodes of the rank's part from those of the graph, which are all."""
        return self._own

    def most(self, num_nodes: int) -> int:
        """Return the number of nodes of the part."""
        return len(self._own)

    def share(
        self, sub_graph: SubGraph, device: torch.device, features: Tensor | None = None
    ) -> Share:
        """Choose the rank's part of the graph."""
        assert isinstance(sub_graph.adjacency, Adjacency)
        self._halo = make_halo(sub_graph.adjacency, self._owners, self._shards.place)
        edges = self._edges(self._halo.to(device), features)
        return Share(self._own, edges, len(self._own))

    def _edges(self, halo: Halo, features: Tensor | None = None) -> HaloEdges:
        return HaloEdges(halo, self._shards, features, self._stale, fused=self._fused)

    def at_step(self, share: Share, step: int, device: torch.device) -> Share:
        """Sample the halo anew, or begin to count what is late."""
        if self._stale is not None:
            self._stale.begin_step()
        if self._kind.method != "sampled":
            return share
        assert self._halo is not None
        some = self._halo.sampled(self._kind.rate, np.random.default_rng((self._seed, step)))
        return share._replace(edges=self._edges(some.to(device)))

    def finish(self) -> None:
        """Wait for what is late."""
        if self._stale is not None:
            self._stale.finish()
