"""Each rank has a part of the nodes, and the rows of their neighbours in other parts: the halo.

    part of rank 0     a b c          a b c | d      rows that rank 0 sums over
    part of rank 1         c -> d e   d e   | c      rows that rank 1 sums over

A layer computes the rows of its own nodes. Before it sums over edges, each rank sends the rows of
its boundary nodes to the ranks that have their neighbours; the gradients of these rows come back
and are added. A node's row travels once to each part that it has an edge into.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.graphs.graph import edges_into, rows_of_kept, sort_rows
from vigpipe.graphs.split.shared import SharedEdges
from vigpipe.graphs.split.stale import StaleHalos
from vigpipe.ops.adjacency import Adjacency, Excerpt, Weighting
from vigpipe.parallel.shards import Contribution, Shards, copies_of

HALOS = "halos"  # what is sent


@dataclass(frozen=True)
class Boundary:
    """Which rows cross the boundaries of all parts: each once for every part that it goes to."""

    owners: np.ndarray  # (b,) int64, the part of each row
    to: np.ndarray  # (b,) int64, the part that it goes to
    halo: np.ndarray  # (h,) int64, which of the b rows are this rank's halo, in the halo's order
    # It says which of the b rows this rank gives to each part, in the order of that part's halo.
    given: tuple[np.ndarray, ...]

    def counts(self, kept: np.ndarray | None = None) -> np.ndarray:
        """Return how many rows go from each part to each, (m, m) int64, of all or the kept rows."""
        rows = slice(None) if kept is None else kept
        counts = np.zeros((len(self.given),) * 2, dtype=np.int64)
        np.add.at(counts, (self.owners[rows], self.to[rows]), 1)
        return counts


@dataclass(frozen=True)
class Halo:
    """What a rank has of a graph in m parts, and what travels between these."""

    nodes: np.ndarray  # (n_k,) int64, the nodes of the rank's part, ascending
    # They end in the nodes. Their sources are these, then the halo, in the order of the parts and
    # of the nodes in each.
    edges: Excerpt
    boundary: Boundary
    counts: np.ndarray  # (m, m) int64, how many nodes of a part, the row, are in another's halo
    # It says which of the rank's rows are in the halo of each part, (counts[k, j],) int64 each.
    given: tuple[Tensor, ...]
    sizes: tuple[int, ...]  # number of nodes of every part

    def to(self, device: torch.device) -> "Halo":
        given = tuple(rows.to(device) for rows in self.given)
        return replace(self, edges=self.edges.to(device), given=given)

    def length(self, part: int) -> int:
        """Return how many rows a part sums over: its own, and those of its halo."""
        return self.sizes[part] + int(self.counts[:, part].sum())

    def rows_from(self, of: int, to: int) -> slice:
        """Return where the rows of one part are among those that another sums over."""
        if of == to:
            return slice(0, self.sizes[to])
        rows = _rows_of(self.counts[:, to], of)
        return slice(self.sizes[to] + rows.start, self.sizes[to] + rows.stop)

    def sampled(self, rate: float, draws: np.random.Generator) -> "Halo":
        """Leave out each row of a halo, and its edges, with probability 1 - rate (BNS-GCN).

        Wan, Li, Li, Kim, Lin 2022 (arXiv:2203.10983). What is left of these edges counts 1 / rate
        times in sums and means, so that their expected values stay; a maximum and attention take
        what is left as if it were all. The rate is above 0, and `draws` the same on all ranks.
        """
        boundary, edges, num_own = self.boundary, self.edges, len(self.nodes)
        is_kept = draws.random(len(boundary.to)) < rate
        stays = torch.ones(edges.num_sources, dtype=torch.bool)
        stays[num_own:] = torch.from_numpy(is_kept[boundary.halo])
        has_source = stays[edges.indices]
        indptr = torch.from_numpy(rows_of_kept(edges.indptr.numpy(), has_source.numpy()))
        indices = (torch.cumsum(stays, 0) - 1)[edges.indices[has_source]]
        factors = torch.ones(len(indices), dtype=torch.float64)
        factors[indices >= num_own] = 1 / rate
        degrees = edges.degrees[stays], edges.loop_degrees[stays]
        weights = None if edges.edge_weights is None else edges.edge_weights[has_source]
        given = zip(self.given, boundary.given, strict=True)
        return replace(
            self,
            edges=Excerpt(indptr, indices, factors, *degrees, weights),
            counts=boundary.counts(is_kept),
            given=tuple(rows[torch.from_numpy(is_kept[at])] for rows, at in given),
        )


def make_halo(adjacency: Adjacency, parts: np.ndarray, rank: int) -> Halo:
    """Find what `rank` has of a graph on the host, whose nodes are in `parts`, (n,) int64."""
    num_parts, num_nodes = int(parts.max()) + 1, adjacency.num_targets
    sources = adjacency.indices.numpy()
    to, sent = _crossings(adjacency.targets.numpy(), sources, parts)
    owners = parts[sent]
    in_halo = np.flatnonzero(to == rank)
    in_halo = in_halo[np.argsort(owners[in_halo], kind="stable")]
    given = [np.flatnonzero((owners == rank) & (to == part)) for part in range(num_parts)]
    boundary = Boundary(owners, to, in_halo, tuple(given))

    nodes = np.flatnonzero(parts == rank)
    here = np.concatenate((nodes, sent[in_halo]))
    row_of = np.full(num_nodes, -1)
    row_of[here] = np.arange(len(here))
    indptr, edges = edges_into(adjacency.indptr.numpy(), nodes)
    indices, order = sort_rows(indptr, row_of[sources[edges]])
    rows, weights = torch.from_numpy(here), adjacency.edge_weights
    if weights is not None:
        weights = weights[torch.from_numpy(edges[order])]
    degrees = adjacency.degrees[rows], adjacency.with_loops().degrees[rows]
    return Halo(
        nodes,
        Excerpt(torch.from_numpy(indptr), torch.from_numpy(indices), None, *degrees, weights),
        boundary,
        boundary.counts(),
        tuple(torch.from_numpy(row_of[sent[rows]]) for rows in given),
        tuple(np.bincount(parts, minlength=num_parts).tolist()),
    )


def _crossings(
    targets: np.ndarray, sources: np.ndarray, parts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return each node with edges into another part, once for each such part: parts, and nodes."""
    crosses = parts[sources] != parts[targets]
    pairs = parts[targets[crosses]] * len(parts) + sources[crosses]
    return np.divmod(np.unique(pairs), len(parts))


class HaloEdges(SharedEdges):
    """The edges that end in the nodes of a rank's part; `stale` keeps halos for the next step."""

    def __init__(
        self,
        halo: Halo,
        shards: Shards,
        features: Tensor | None = None,
        stale: StaleHalos | None = None,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__(halo.edges, shards, len(halo.nodes), features, fused=fused)
        self.halo, self.stale = halo, stale

    def sums(self, x: Tensor, weighting: Weighting, added: Tensor | None = None) -> Tensor:
        return super().sums(self._with_halo(x), weighting, added)

    def maximum(self, x: Tensor) -> Tensor:
        return super().maximum(self._with_halo(x))

    def pair_keys(self, keys: Tensor) -> Tensor:
        return super().pair_keys(with_halo(keys[:, None], self.halo, self.shards)[:, 0])

    def pair_softmax(self, of_sources: Tensor, of_targets: Tensor, slope: float) -> Tensor:
        return super().pair_softmax(self._with_halo(of_sources), of_targets, slope)

    def pair_scores(self, left: Tensor, right: Tensor, weights: Tensor, slope: float) -> Tensor:
        rows = self._with_halo(left)
        self._scored = left, rows
        return super().pair_scores(rows, right, weights, slope)

    def attention_sum(self, shares: Tensor, x: Tensor) -> Tensor:
        rows = self._take_scored(x)
        return super().attention_sum(shares, self._with_halo(x) if rows is None else rows)

    def _with_halo(self, x: Tensor) -> Tensor:
        if self.stale is not None and x.requires_grad and torch.is_grad_enabled():
            return with_halo(x, self.halo, self.shards, (self.stale, self.stale.slot()))
        return self._fetch_once(x, lambda: with_halo(x, self.halo, self.shards))


def with_halo(
    x: Tensor, halo: Halo, shards: Shards, late: tuple[StaleHalos, int] | None = None
) -> Tensor:
    """Put the rows of the halo behind those of a rank: (n_k, C) -> (n_k + halo, C).

    With `late`, and its slot there, the halo and its gradients are those of the last step.
    """
    return _WithHalo.apply(x, halo, shards, late)


class _WithHalo(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, halo: Halo, shards: Shards, late: tuple[StaleHalos, int] | None
    ) -> Tensor:
        ctx.halo, ctx.shards, ctx.late = halo, shards, late
        rank, counts = shards.rank, halo.counts
        if late is None:
            write = copies_of(lambda to: x if to == rank else x[halo.given[to]])
            shapes = [(halo.length(part), x.shape[1]) for part in range(shards.size)]
            return shards.exchange(
                Contribution(write, shapes, lambda of, to: (halo.rows_from(of, to),), x), HALOS
            )
        write = copies_of(lambda to: x[halo.given[to]])
        shapes = [(int(counts[:, part].sum()), x.shape[1]) for part in range(shards.size)]
        begun = shards.begin(
            Contribution(write, shapes, lambda of, to: (_rows_of(counts[:, to], of),), x), HALOS
        )
        assert not counts[rank, rank]
        stale, slot = late
        return torch.cat((x, stale.last(("features", slot), begun)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        halo, shards, rank, counts = ctx.halo, ctx.shards, ctx.shards.rank, ctx.halo.counts
        write = copies_of(lambda to: grad[:0] if to == rank else grad[halo.rows_from(to, rank)])
        shapes = [(int(of_part.sum()), grad.shape[1]) for of_part in counts]
        given = Contribution(write, shapes, lambda of, to: (_rows_of(counts[to], of),), grad)
        if ctx.late is None:
            back = shards.exchange(given, HALOS)
        else:
            stale, slot = ctx.late
            back = stale.last(("gradients", slot), shards.begin(given, HALOS))
        d_x = grad[: halo.sizes[rank]].clone()
        for rows, part in zip(halo.given, back.split(counts[rank].tolist()), strict=True):
            d_x.index_add_(0, rows, part)
        return d_x, None, None, None


def _rows_of(counts: np.ndarray, part: int) -> slice:
    """Return where a part's rows are, if so many rows of each part follow one another."""
    first = int(counts[:part].sum())
    return slice(first, first + int(counts[part]))


def work_of_parts(
    targets: np.ndarray, sources: np.ndarray, parts: np.ndarray, num_parts: int
) -> np.ndarray:
    """Count the rows of each part, those with its halo, and the edges into it: (m, 3) int64."""
    to, _ = _crossings(targets, sources, parts)
    own = np.bincount(parts, minlength=num_parts)
    halo = np.bincount(to, minlength=num_parts)
    edges = np.bincount(parts[targets], minlength=num_parts)
    return np.stack((own, own + halo, edges), axis=1)
