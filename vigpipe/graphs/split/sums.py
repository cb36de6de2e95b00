"""Sums over the edges of nodes that several ranks share by rows, with gradients.

A rank sums some columns of all nodes. Its columns come from the ranks that have the rows, and the
sums go back to them:

    rows, (n_k, C)  ->  columns, (n, C_k)  ->  their sums, (n, C_k)  ->  rows, (n_k, C)

Ranks of one machine write the sums into each other's memory. Where ranks send, they can do so in
chunks of nodes: each chunk is summed as soon as the rows that it needs have come, and is then sent
at once. A row is summed in one go, so the result does not depend on the chunks.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from vigpipe.graphs.chunks import Chunks
from vigpipe.ops.adjacency import Adjacency, Weighting
from vigpipe.ops.sparse import write_sums
from vigpipe.parallel.shards import Contribution, Shards, copies_of
from vigpipe.parallel.switch import SWITCHES, cut, length_of

MOST_PIECES = 2  # into which a rank cuts its columns
LEAST_COLUMNS = 64  # narrower pieces would cost more than they save


class Sums(Protocol):
    """Sums over the edges of n nodes."""

    @property
    def num_nodes(self) -> int: ...

    def transpose(self) -> "Sums":
        """Return the sums over the reversed edges, as the backward takes them."""
        ...

    def write(
        self, x: Tensor, rows: Sequence[slice], out: Sequence[Tensor], added: Tensor | None
    ) -> None:
        """Write the sums of x, (n, c), plus `added`, (c,), for some pieces of rows.

        Each piece is written to a tensor of `out`, whose rows may be apart.
        """
        ...


class WholeSums(NamedTuple):
    """Sums on a rank that has all edges, with the weights `weighting` of `Adjacency.weights`."""

    adjacency: Adjacency
    weighting: Weighting
    fused: bool
    transposed: bool = False

    @property
    def graph(self) -> Adjacency:
        """The edges in the direction in which they are summed."""
        return self.adjacency.transposed if self.transposed else self.adjacency

    @property
    def num_nodes(self) -> int:
        return self.adjacency.num_targets

    def transpose(self) -> "WholeSums":
        return self._replace(transposed=not self.transposed)

    def write(
        self, x: Tensor, rows: Sequence[slice], out: Sequence[Tensor], added: Tensor | None
    ) -> None:
        options = {"transposed": self.transposed, "fused": self.fused}
        for piece, of_piece in zip(rows, out, strict=True):
            write_sums(self.adjacency, x, self.weighting, piece, of_piece, added, **options)


class ProductColumns(Function):
    """Multiply, and write products to where they are summed: (n_k, C) -> (n_k, C'), (n, C'_k).

    The rank's rows x are multiplied by weight^T, (C, C'); there are n nodes on all ranks. The first
    result has no numbers, but stands for the rank's rows of the products, and takes their gradient;
    the second is the rank's columns of all rows. `SwitchedSums` takes both.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, num_nodes: int, shards: Shards
    ) -> tuple[Tensor, Tensor]:
        rows, owned = shards.slices(num_nodes), shards.slices(len(weight))

        def multiply(blocks: Sequence[Tensor]) -> None:
            for block, channels in zip(blocks, owned, strict=True):
                torch.mm(x, weight[channels].T, out=block)

        shapes = [(num_nodes, length_of(channels)) for channels in owned]
        columns = shards.exchange(
            Contribution(multiply, shapes, lambda of, to: (rows[of],), x), SWITCHES
        )
        ctx.save_for_backward(x, weight)
        ctx.mark_non_differentiable(columns)
        ctx.set_materialize_grads(False)  # no zeros for the columns
        return x.new_zeros(()).expand(len(x), len(weight)), columns

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, weight = ctx.saved_tensors
        d_x = grad @ weight if ctx.needs_input_grad[0] else None
        d_weight = grad.T @ x if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None, None


class SwitchedSums(Function):
    """Switch to columns, sum what the edges bring, and switch back: (n_k, C) -> (n_k, C).

    The rank's columns of all rows are not in memory at once, unless they are known; then only the
    shape, type and gradient of the rank's rows, x, count. What is added to the sums is (n_k, C), or
    (C,) for all nodes. Chunks of nodes leave as they are summed, for which the sums must be
    `WholeSums`; without chunks, all leave at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        columns: Tensor | None,
        added: Tensor | None,
        sums: Sums,
        shards: Shards,
        chunks: Chunks | None,
    ) -> Tensor:
        ctx.sums, ctx.shards, ctx.chunks = sums, shards, chunks
        ctx.added = None if added is None else (added.dim(), added.dtype)
        bias = added if added is not None and added.dim() == 1 else None
        y = _sum_by_columns(x, columns, bias, sums, shards, chunks)
        return y if added is None or added.dim() == 1 else y.add_(added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        d_x = d_added = None
        if ctx.needs_input_grad[0]:
            rest = ctx.sums.transpose(), ctx.shards, ctx.chunks
            d_x = _sum_by_columns(grad, None, None, *rest)
        if ctx.needs_input_grad[2]:
            dim, dtype = ctx.added
            d_added = (grad.sum(0) if dim == 1 else grad).to(dtype)
        return d_x, None, d_added, None, None, None


def _sum_by_columns(
    x: Tensor,
    columns: Tensor | None,
    bias: Tensor | None,
    sums: Sums,
    shards: Shards,
    chunks: Chunks | None,
) -> Tensor:
    """Let every rank sum its columns, piece by piece, into the rows of all: (n_k, C)."""
    num_channels = x.shape[1]
    rows, owned = shards.slices(sums.num_nodes), shards.slices(num_channels)
    own, pieces = owned[shards.rank], _pieces(owned, columns is not None)
    if chunks is not None:
        assert isinstance(sums, WholeSums)
        y = x.new_empty(len(x), num_channels)
        begun = [_sum_in_chunks(x, columns, bias, sums, shards, chunks, p, y) for p in pieces]
        for wait in chain.from_iterable(begun):
            wait()
        return y

    def fill(blocks: Sequence[Tensor]) -> None:
        for piece in pieces:
            part = columns
            if part is None:
                part = shards.exchange(_columns_of(x, piece, rows, sums.num_nodes), SWITCHES)
            mine = piece[shards.rank]
            here = slice(mine.start - own.start, mine.stop - own.start)
            of_bias = None if bias is None else bias[mine]
            sums.write(part, rows, [block[:, here] for block in blocks], of_bias)

    return shards.exchange(
        Contribution(
            fill,
            [(length_of(of_rank), num_channels) for of_rank in rows],
            lambda of, to: (slice(None), owned[of]),
            x,
        ),
        SWITCHES,
    )


def _sum_in_chunks(
    x: Tensor,
    columns: Tensor | None,
    bias: Tensor | None,
    sums: WholeSums,
    shards: Shards,
    chunks: Chunks,
    piece: Sequence[slice],
    y: Tensor,
) -> list[Callable[[], Tensor]]:
    """Sum a piece of every rank's columns to y, (n_k, C); return what waits for each chunk."""
    mine = piece[shards.rank]
    of_bias = None if bias is None else bias[mine]
    part, arrivals = columns, []
    if part is None:
        part = x.new_empty(sums.num_nodes, length_of(mine))
        for of_chunk in chunks.rows:
            some = x[chunks.local(of_chunk, shards.rank)]
            columns_of = _columns_of(some, piece, of_chunk, sums.num_nodes)
            arrivals.append(shards.begin(columns_of, SWITCHES, part))
    shapes = [(length_of(of_rank), x.shape[1]) for of_rank in chunks.of_ranks]
    num_arrived, waits = 0, []
    # All ranks must begin their exchanges in one order: first the chunks that need few others.
    in_turn = zip(chunks.rows, chunks.last_needed(sums.graph), strict=True)
    for of_chunk, last in sorted(in_turn, key=lambda chunk: chunk[1]):
        for arrived in arrivals[num_arrived : last + 1]:
            arrived()
        num_arrived = max(num_arrived, last + 1)
        contribution = Contribution(
            lambda blocks, c=of_chunk: sums.write(part, c, blocks, of_bias),
            shapes,
            lambda of, to, c=of_chunk: (chunks.local(c, to), piece[of]),
            x,
        )
        waits.append(shards.begin(contribution, SWITCHES, y))
    for arrived in arrivals[num_arrived:]:  # no edge needs these
        arrived()
    return waits


def _pieces(owned: Sequence[slice], are_whole: bool) -> list[tuple[slice, ...]]:
    """Cut columns into pieces with some of every rank: one at a time is in memory for all rows."""
    narrowest = min(map(length_of, owned))
    number = 1 if are_whole else max(1, min(MOST_PIECES, narrowest // LEAST_COLUMNS))
    return list(zip(*(cut(of_rank, number) for of_rank in owned), strict=True))


def _columns_of(
    x: Tensor, piece: Sequence[slice], rows: Sequence[slice], num_nodes: int
) -> Contribution:
    """Give every rank its columns of x, which has `rows[of]` of all rows on the rank `of`."""
    return Contribution(
        copies_of(lambda to: x[:, piece[to]]),
        [(num_nodes, length_of(of_rank)) for of_rank in piece],
        lambda of, to: (rows[of],),
        x,
    )
