"""Edges that each rank keeps for its own nodes only, and that travel: --adjacency split.

A rank sums some columns of all nodes, for which it needs all edges. It keeps the block of those
that end in its own nodes, and, for the backward, of those that leave them. Whenever columns are
summed, the blocks go once round the ranks, so that a rank has two at a time: its neighbour's is on
its way while it sums over its own.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.graphs.split.mixed import MixedEdges
from vigpipe.ops.adjacency import Adjacency, Excerpt, Factors, Weighting
from vigpipe.ops.sparse import kernels_for, widened, write_sums
from vigpipe.parallel.shards import Contribution, Shards, copies_of
from vigpipe.parallel.switch import length_of, send_columns, send_rows

EDGES = "edges"  # what is sent
_FITS_INT32 = 1 << 31


class Block(Adjacency):
    """The edges that end in the nodes of one rank, or those that leave them if transposed.

    `packed` has where the edges of each row begin, then the sources, then the bits of the float32
    weights, if they have some: (rows + 1 + e,) or (rows + 1 + 2 e,). `degrees` has no edges, but
    the degrees of all nodes of the graph, which is not transposed.
    """

    def __init__(
        self, packed: Tensor, rows: slice, degrees: Excerpt, transposed: bool, *, weighted: bool
    ) -> None:
        num_rows = length_of(rows) + 1
        num_edges, weights = len(packed) - num_rows, None
        if weighted:
            num_edges //= 2
            weights = packed[num_rows + num_edges :].int().view(torch.float32)
        indptr, indices = packed[: num_rows + num_edges].long().tensor_split([num_rows])
        self._keep(indptr, indices, degrees.num_targets, weights)
        self._rows, self._of_nodes, self._is_transposed = rows, degrees, transposed

    def factors(
        self, weighting: Weighting, dtype: torch.dtype, transposed: bool = False
    ) -> Factors:
        assert not transposed  # the reversed edges are another block
        _, of_sources, of_targets = self._of_nodes.factors(weighting, dtype, self._is_transposed)
        of_edges = None if self.edge_weights is None else self.edge_weights.to(dtype)
        return Factors(of_edges, of_sources, None if of_targets is None else of_targets[self._rows])


class Blocks:
    """The edges of a graph on the host in blocks, of which this rank keeps its own on a device."""

    def __init__(self, whole: Adjacency, shards: Shards, device: torch.device) -> None:
        self.num_nodes, self._shards = whole.num_targets, shards
        self._rows = shards.slices(self.num_nodes)
        self._weighted = whole.edge_weights is not None
        degrees = whole.degrees.to(device)
        nowhere = torch.zeros(self.num_nodes + 1, dtype=torch.int64, device=device)
        self._degrees = Excerpt(nowhere, nowhere[:0], None, degrees, degrees)
        blocks = _packed(whole, self._rows)
        is_symmetric = whole.transposed is whole
        reverse = blocks if is_symmetric else _packed(whole.transposed, self._rows)
        self._sizes = [[len(block) for block in of_all] for of_all in (blocks, reverse)]
        self._own = [of_all[shards.rank].to(device) for of_all in (blocks, reverse)]

    def in_turn(self, transposed: bool) -> Iterator[tuple[int, Block]]:
        """Yield each rank and its block, this rank's first."""
        shards, sizes = self._shards, self._sizes[transposed]
        packed = self._own[transposed]
        for distance in range(shards.size):
            owner = (shards.rank + distance) % shards.size
            following = None
            if distance + 1 < shards.size:
                following = self._pass_on(packed, sizes, distance)
            rest = self._rows[owner], self._degrees, transposed
            yield owner, Block(packed, *rest, weighted=self._weighted)
            if following is not None:
                packed = following()

    def _pass_on(self, packed: Tensor, sizes: Sequence[int], distance: int) -> Callable[[], Tensor]:
        """Begin to give the block to the rank before this one, and to get the next rank's."""
        shards = self._shards
        before = (shards.rank - 1) % shards.size

        def size_for(rank: int) -> int:
            return sizes[(rank + 1 + distance) % shards.size]

        contribution = Contribution(
            copies_of(lambda to: packed if to == before else packed[:0]),
            [(size_for(rank),) for rank in range(shards.size)],
            lambda of, to: (slice(0, size_for(to) if (to + 1) % shards.size == of else 0),),
            packed,
        )
        return shards.begin(contribution, EDGES, packed.new_empty(size_for(shards.rank)))


class TravellingSums(NamedTuple):
    """Sums over edges whose blocks travel; see `vigpipe.graphs.split.sums.Sums`."""

    blocks: Blocks
    weighting: Weighting
    fused: bool
    transposed: bool = False

    @property
    def num_nodes(self) -> int:
        return self.blocks.num_nodes

    def transpose(self) -> "TravellingSums":
        return self._replace(transposed=not self.transposed)

    def write(
        self, x: Tensor, rows: Sequence[slice], out: Sequence[Tensor], added: Tensor | None
    ) -> None:
        """Write the sums of all nodes, with the rows of each rank in `rows`; see `Sums.write`."""
        for owner, block in self.blocks.in_turn(self.transposed):
            every = slice(0, length_of(rows[owner]))
            write_sums(block, x, self.weighting, every, out[owner], added, fused=self.fused)


class TravellingEdges(MixedEdges):
    """The edges of a graph on the host, between rows on a device; `GraphJob` refuses attention."""

    def __init__(
        self,
        whole: Adjacency,
        shards: Shards,
        device: torch.device,
        features: Tensor | None = None,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__(whole, shards, features, fused=fused)
        self._device = device
        self._made: dict[bool, Blocks] = {}  # without loops (False), and with them (True)
        self._has_loops = False

    def with_loops(self) -> Self:
        looped = copy(self)
        looped._has_loops = True
        return looped

    def maximum(self, x: Tensor) -> Tensor:
        y = _Maximum.apply(self._to_columns(x), self._blocks, x.shape[1], self.shards, self.fused)
        return y

    def _sums(self, weighting: Weighting) -> TravellingSums:
        return TravellingSums(self._blocks, weighting, self.fused)

    @property
    def _blocks(self) -> Blocks:
        if self._has_loops not in self._made:
            # What is computed from the whole graph is freed with this copy of it.
            whole = self.adjacency
            edges = whole.indptr, whole.indices
            graph = Adjacency.unchecked(*edges, whole.num_sources, whole.edge_weights)
            graph = graph.with_loops() if self._has_loops else graph
            self._made[self._has_loops] = Blocks(graph, self.shards, self._device)
        return self._made[self._has_loops]


class _Maximum(Function):
    @staticmethod
    def forward(
        ctx: Any, columns: Tensor, blocks: Blocks, num_channels: int, shards: Shards, fused: bool
    ) -> Tensor:
        of_all, has_backward = widened(columns), ctx.needs_input_grad[0]
        shape = columns.shape if has_backward else (0,)
        winners = torch.empty(shape, dtype=torch.int32, device=columns.device)
        rows, kernels = shards.slices(blocks.num_nodes), kernels_for(columns, fused)
        y = torch.empty_like(columns)
        for owner, block in blocks.in_turn(transposed=False):
            y[rows[owner]], of_block = kernels.maxima(block, of_all, has_backward)
            if has_backward:
                winners[rows[owner]] = of_block
        ctx.save_for_backward(winners)
        ctx.num_nodes, ctx.shards, ctx.fused = blocks.num_nodes, shards, fused
        return send_rows(y, shards, num_channels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (winners,) = ctx.saved_tensors
        columns = send_columns(grad, ctx.shards, ctx.num_nodes)
        # The kernel of a GPU wants all edges.
        kernels = kernels_for(columns, ctx.fused and not columns.is_cuda)
        sources = Adjacency(
            winners.new_zeros(ctx.num_nodes + 1).long(), winners.new_zeros(0).long()
        )
        d_columns = kernels.maxima_backward(sources, widened(columns), winners).to(grad.dtype)
        return d_columns, None, None, None, None


def _packed(graph: Adjacency, rows: Sequence[slice]) -> list[Tensor]:
    """Return each rank's edges as they travel; see `Block`."""
    dtype = torch.int32 if max(graph.num_edges, graph.num_sources) < _FITS_INT32 else torch.int64
    blocks = []
    for of_rank in rows:
        indptr = graph.indptr[of_rank.start : of_rank.stop + 1]
        edges = slice(int(indptr[0]), int(indptr[-1]))
        packed = torch.cat((indptr - indptr[0], graph.indices[edges])).to(dtype)
        if graph.edge_weights is not None:
            bits = graph.edge_weights[edges].float().view(torch.int32)
            packed = torch.cat((packed, bits.to(dtype)))
        blocks.append(packed)
    return blocks
