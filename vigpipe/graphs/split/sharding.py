"""What a rank has of a sub-graph: all of it, some rows, or a part with its halo."""

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


class Shard(NamedTuple):
    """What a rank has of a sub-graph."""

    nodes: np.ndarray  # (b,) int64
    edges: Adjacency | Layered | Edges
    num_targets: int  # how many of the nodes, the first ones, get logits
    weights: np.ndarray | None = None  # as in `SubGraph`, of the rank's nodes


class Sharding(Protocol):
    """How the ranks of a replica share its sub-graphs."""

    has_all: bool = False  # whether this rank has all of each sub-graph

    def own(self, nodes: np.ndarray) -> np.ndarray:
        """Choose the rank's nodes from those of a sub-graph."""
        ...

    def most(self, num_nodes: int) -> int:
        """Bound the rank's nodes of a sub-graph that has at most `num_nodes`."""
        ...

    def shard(
        self, sub_graph: SubGraph, device: torch.device, features: Tensor | None = None
    ) -> Shard:
        """Choose what the rank has of a sub-graph on the host, and put its edges on the device.

        `features` are those of the rank's nodes, if they are the same tensor in every call.
        """
        ...

    def at_step(self, shard: Shard, step: int, device: torch.device) -> Shard:
        """Return the shard for a step of training, where it depends on the step."""
        return shard

    def finish(self) -> None:
        """Wait for what other ranks still send."""
        return


class Unsharded(Sharding):
    """One rank, which has all."""

    has_all = True

    def own(self, nodes: np.ndarray) -> np.ndarray:
        return nodes

    def most(self, num_nodes: int) -> int:
        return num_nodes

    def shard(
        self, sub_graph: SubGraph, device: torch.device, features: Tensor | None = None
    ) -> Shard:
        edges = sub_graph.adjacency.to(device)
        return Shard(sub_graph.nodes, edges, edges.num_targets, sub_graph.weights)


class ShardedByRows(Sharding):
    """Ranks with some rows each, or columns of all: --split mixed."""

    def __init__(self, shards: Shards, *, chunks: int, travels: bool, fused: bool) -> None:
        self._shards, self._chunks, self._fused = shards, chunks, fused
        self._travels = travels  # whether a rank keeps only the edges of its own nodes

    def own(self, nodes: np.ndarray) -> np.ndarray:
        return nodes[self._shards.own(len(nodes))]

    def most(self, num_nodes: int) -> int:
        return self._shards.count(num_nodes)

    def shard(
        self, sub_graph: SubGraph, device: torch.device, features: Tensor | None = None
    ) -> Shard:
        nodes, adjacency, weights = sub_graph
        assert isinstance(adjacency, Adjacency)  # `GraphJob.check` has refused others
        shards, fused = self._shards, self._fused
        if self._travels:
            edges = TravellingEdges(adjacency, shards, device, features, fused=fused)
        else:
            adjacency = adjacency.to(device)
            edges = MixedEdges(adjacency, shards, features, chunks=self._chunks, fused=fused)
        own = self.own(nodes)
        weights = None if weights is None else weights[shards.own(len(nodes))]
        return Shard(own, edges, len(own), weights)


class ShardedByParts(Sharding):
    """Ranks with parts of the whole graph, those of `owners`, (n,) int64: --split halo."""

    def __init__(
        self, shards: Shards, owners: np.ndarray, kind: HaloKind, seed: int, *, fused: bool
    ) -> None:
        self._shards, self._owners, self._kind, self._seed = shards, owners, kind, seed
        self._fused, self._own = fused, np.flatnonzero(owners == shards.rank)
        self._stale = StaleHalos() if kind.method == "stale" else None
        self._halo: Halo | None = None  # on the host

    def own(self, nodes: np.ndarray) -> np.ndarray:
        return self._own  # the nodes are always those of the whole graph

    def most(self, num_nodes: int) -> int:
        return len(self._own)

    def shard(
        self, sub_graph: SubGraph, device: torch.device, features: Tensor | None = None
    ) -> Shard:
        assert isinstance(sub_graph.adjacency, Adjacency)
        self._halo = make_halo(sub_graph.adjacency, self._owners, self._shards.rank)
        edges = self._edges(self._halo.to(device), features)
        return Shard(self._own, edges, len(self._own))

    def _edges(self, halo: Halo, features: Tensor | None = None) -> HaloEdges:
        return HaloEdges(halo, self._shards, features, self._stale, fused=self._fused)

    def at_step(self, shard: Shard, step: int, device: torch.device) -> Shard:
        """Sample the halo anew, or begin to number the exchanges whose halos come late."""
        if self._stale is not None:
            self._stale.begin_step()
        if self._kind.method != "sampled":
            return shard
        assert self._halo is not None
        some = self._halo.sampled(self._kind.rate, np.random.default_rng((self._seed, step)))
        return shard._replace(edges=self._edges(some.to(device)))

    def finish(self) -> None:
        if self._stale is not None:
            self._stale.finish()
