"""What ranks that share a graph exchange in a layer, with gradients.

Of n nodes and C channels, rank k of m has in one form some rows, (n_k, C), and in the other some
columns of all rows, (n, C_k). A switch goes from one form to the other; its gradient goes back:

    rows      rank 0: node 0 ... |a a|b b|     columns    rank 0: nodes 0 ... n - 1   |a a|
              rank 1: node k ... |a a|b b|                rank 1: nodes 0 ... n - 1   |b b|

A switch sends every number once, unless it stays where it is: n C (m - 1) / m numbers in all,
however many ranks there are. Channels may be those of several heads side by side; then every rank
has some of the channels of each head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from vigpipe.ops.adjacency import Adjacency, Kind
from vigpipe.ops.sparse import write_sums
from vigpipe.parallel.shards import Gifts, Shards, copies_of

SWITCHES, SCORES = "switches", "scores"  # what is sent
MOST_PIECES, LEAST_COLUMNS = 2, 64  # that a rank cuts its columns into; of a piece
_EVERY = slice(None)


def to_columns(x: Tensor, shards: Shards, num_rows: int, heads: int = 1) -> Tensor:
    """Switch from rows to columns: (n_k, H * c) -> (n, H * c_k).

    Args:
        x: the rank's rows.
        shards: the ranks.
        num_rows: n, of all ranks together.
        heads: H.
    """
    return _ToColumns.apply(x, shards, num_rows, heads)  # pyright: ignore[reportReturnType]


def to_rows(x: Tensor, shards: Shards, num_channels: int, heads: int = 1) -> Tensor:
    """Switch from columns to rows: (n, H * c_k) -> (n_k, H * c).

    Args:
        x: the rank's columns.
        shards: the ranks.
        num_channels: H * c, of all ranks together.
        heads: H.
    """
    return _ToRows.apply(x, shards, num_channels, heads)  # pyright: ignore[reportReturnType]


def switched_sums(
    x: Tensor,
    columns: Tensor | None,
    added: Tensor | None,
    kind: Kind,
    adjacency: Adjacency,
    shards: Shards,
    fused: bool,
) -> Tensor:
    """Switch to columns, sum what the edges bring, and switch back: (n_k, C) -> (n_k, C).

    Each rank sums its columns of another's rows into the memory of that one, so that the second
    switch takes no time of its own. Of the columns, some are there at a time.

    Args:
        x: the rank's rows.
        columns: the rank's columns of all rows, if they are known; x then needs no gradient.
        added: (n_k, C), or (C,) for all nodes, that is added to the sums; None for nothing.
        kind: which weights; see `Adjacency.weights`.
        adjacency: the whole graph.
        shards: the ranks.
        fused: use the fused kernels where there are any.
    """
    y = _SwitchedSums.apply(x, columns, added, kind, adjacency, shards, fused)
    return y  # pyright: ignore[reportReturnType]


def all_rows(x: Tensor, shards: Shards, num_rows: int) -> Tensor:
    """Give every rank the rows of all: (n_k, C) -> (n, C)."""
    return _AllRows.apply(x, shards, num_rows)  # pyright: ignore[reportReturnType]


def total(x: Tensor, shards: Shards) -> Tensor:
    """Add up what all ranks have, of one shape; each gets the sum."""
    return _Total.apply(x, shards)  # pyright: ignore[reportReturnType]


class _ToColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, num_rows: int, heads: int) -> Tensor:  # noqa: ANN401
        ctx.shards, ctx.num_channels, ctx.heads = shards, x.shape[1], heads
        return _send_columns(x, shards, num_rows, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return _send_rows(grad, ctx.shards, ctx.num_channels, ctx.heads), None, None, None


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, num_channels: int, heads: int) -> Tensor:  # noqa: ANN401
        ctx.shards, ctx.num_rows, ctx.heads = shards, len(x), heads
        return _send_rows(x, shards, num_channels, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return _send_columns(grad, ctx.shards, ctx.num_rows, ctx.heads), None, None, None


class _SwitchedSums(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        columns: Tensor | None,
        added: Tensor | None,
        kind: Kind,
        adjacency: Adjacency,
        shards: Shards,
        fused: bool,
    ) -> Tensor:
        ctx.kind, ctx.adjacency, ctx.shards, ctx.fused = kind, adjacency, shards, fused
        ctx.added = None if added is None else (added.dim(), added.dtype)
        bias = added if added is not None and added.dim() == 1 else None
        edges = _Sums(adjacency, kind, transposed=False, fused=fused)
        y = _sum_by_columns(x, columns, bias, edges, shards)
        return y if added is None or added.dim() == 1 else y.add_(added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x = d_added = None
        if ctx.needs_input_grad[0]:
            edges = _Sums(ctx.adjacency, ctx.kind, transposed=True, fused=ctx.fused)
            d_x = _sum_by_columns(grad, None, None, edges, ctx.shards)
        if ctx.needs_input_grad[2]:
            dim, dtype = ctx.added
            d_added = (grad.sum(0) if dim == 1 else grad).to(dtype)
        return d_x, None, d_added, None, None, None, None


class _Sums(NamedTuple):
    """Sums over edges, or over the edges turned round."""

    adjacency: Adjacency
    kind: Kind
    transposed: bool
    fused: bool

    @property
    def num_sources(self) -> int:
        graph = self.adjacency
        return graph.num_targets if self.transposed else graph.num_sources

    @property
    def num_targets(self) -> int:
        graph = self.adjacency
        return graph.num_sources if self.transposed else graph.num_targets

    def write(self, columns: Tensor, rows: slice, out: Tensor, added: Tensor | None) -> None:
        ways = {"transposed": self.transposed, "fused": self.fused}
        write_sums(self.adjacency, columns, self.kind, rows, out, added, **ways)


def _sum_by_columns(
    x: Tensor, columns: Tensor | None, bias: Tensor | None, sums: _Sums, shards: Shards
) -> Tensor:
    """Let every rank sum its columns, some at a time, into the rows of all: (n_k, C) -> (n_k, C).

    Args:
        x: the rank's rows.
        columns: the rank's columns of all rows, if they are known.
        bias: (C,), that is added to each sum; None for nothing.
        sums: what is summed.
        shards: the ranks.
    """
    num_channels = x.shape[1]
    rows, owned = shards.slices(sums.num_targets), shards.slices(num_channels)
    own = owned[shards.place]

    def fill(blocks: Sequence[Tensor]) -> None:
        for piece in _pieces(owned, columns is not None):
            # Of each rank's columns, the same piece: (n_k, c) go to the rank that sums them.
            part = columns
            if part is None:
                part = _send_pieces(x, [piece(of_rank) for of_rank in owned], sums, shards)
            mine = piece(own)
            here = slice(mine.start - own.start, mine.stop - own.start)
            of_bias = None if bias is None else bias[mine]
            for of_rank, block in zip(rows, blocks, strict=True):
                sums.write(part, of_rank, block[:, here], of_bias)

    return shards.exchange(
        Gifts(
            fill,
            [(_length(of_rank), num_channels) for of_rank in rows],
            lambda of, to: (_EVERY, owned[of]),
            x,
        ),
        SWITCHES,
    )


def _pieces(owned: Sequence[slice], are_whole: bool) -> list[Callable[[slice], slice]]:
    """Cut the columns of every rank into the same number of pieces.

    Only one of them is in memory as columns of all rows; narrow ones would cost more than they
    save.
    """
    narrowest = min(map(_length, owned))
    number = 1 if are_whole else max(1, min(MOST_PIECES, narrowest // LEAST_COLUMNS))

    def cut(index: int, of_rank: slice) -> slice:
        ends = [of_rank.start + _length(of_rank) * i // number for i in (index, index + 1)]
        return slice(*ends)

    return [partial(cut, index) for index in range(number)]


def _send_pieces(x: Tensor, pieces: Sequence[slice], sums: _Sums, shards: Shards) -> Tensor:
    """Send every rank a piece of its columns of this rank's rows."""
    rows = shards.slices(sums.num_sources)
    return shards.exchange(
        Gifts(
            copies_of(lambda to: x[:, pieces[to]]),
            [(sums.num_sources, _length(piece)) for piece in pieces],
            lambda of, to: (rows[of],),
            x,
        ),
        SWITCHES,
    )


class _AllRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, num_rows: int) -> Tensor:  # noqa: ANN401
        ctx.shards = shards
        return shards.gathered(x, shards.counts(num_rows), SCORES)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        shards: Shards = ctx.shards
        rows = shards.slices(len(grad))
        parts = shards.exchange(
            Gifts(
                copies_of(lambda to: grad[rows[to]][None]),
                [(shards.size, _length(of_rank), grad.shape[1]) for of_rank in rows],
                lambda of, to: (slice(of, of + 1),),
                grad,
            ),
            SCORES,
        )
        return parts.sum(0), None, None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:  # noqa: ANN401
        ctx.shards = shards
        return shards.total(x, SCORES)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.shards.total(grad, SCORES), None


def _send_columns(x: Tensor, shards: Shards, num_rows: int, heads: int = 1) -> Tensor:
    """Send every rank its columns of this rank's rows; see `to_columns`."""
    by_heads = x.reshape(len(x), heads, x.shape[1] // heads)
    rows, columns = shards.slices(num_rows), shards.slices(by_heads.shape[2])
    y = shards.exchange(
        Gifts(
            copies_of(lambda to: by_heads[:, :, columns[to]]),
            [(num_rows, heads, _length(of_rank)) for of_rank in columns],
            lambda of, to: (rows[of],),
            x,
        ),
        SWITCHES,
    )
    return y.flatten(1)


def _send_rows(x: Tensor, shards: Shards, num_channels: int, heads: int) -> Tensor:
    """Send every rank its rows of this rank's columns; see `to_rows`."""
    by_heads, num = x.reshape(len(x), heads, x.shape[1] // heads), num_channels // heads
    rows, columns = shards.slices(len(x)), shards.slices(num)
    y = shards.exchange(
        Gifts(
            copies_of(lambda to: by_heads[rows[to]]),
            [(_length(of_rank), heads, num) for of_rank in rows],
            lambda of, to: (_EVERY, _EVERY, columns[of]),
            x,
        ),
        SWITCHES,
    )
    return y.flatten(1)


def _length(entries: slice) -> int:
    return entries.stop - entries.start
