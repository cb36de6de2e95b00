"""What ranks that share rows, of nodes of a graph or of an image, exchange, with gradients.

Of n rows and C channels, rank k of m has in one form some rows, (n_k, C), and in the other some
columns of all rows, (n, C_k). A switch goes from one form to the other; its gradient goes back:

    rows      rank 0: row 0 ... |a a|b b|     columns    rank 0: rows 0 ... n - 1   |a a|
              rank 1: row k ... |a a|b b|                rank 1: rows 0 ... n - 1   |b b|

A switch sends every number once, unless it stays where it is: n C (m - 1) / m numbers in all,
however many ranks there are. Channels may be those of several heads, or images, side by side; then
every rank has some of the channels of each.
"""

import itertools
from typing import Any

from torch import Tensor
from torch.autograd import Function

from vigpipe.parallel.shards import Contribution, Shards, copies_of

SWITCHES, SCORES = "switches", "scores"  # what is sent
_EVERY = slice(None)


def to_columns(x: Tensor, shards: Shards, num_rows: int, heads: int = 1) -> Tensor:
    """Switch from rows to columns, with H heads: (n_k, H * c) -> (n, H * c_k).

    All ranks together have n rows.
    """
    return _ToColumns.apply(x, shards, num_rows, heads)  # pyright: ignore[reportReturnType]


def to_rows(x: Tensor, shards: Shards, num_channels: int, heads: int = 1) -> Tensor:
    """Switch from columns to rows, with H heads: (n, H * c_k) -> (n_k, H * c).

    All ranks together have H * c channels.
    """
    return _ToRows.apply(x, shards, num_channels, heads)  # pyright: ignore[reportReturnType]


def all_rows(x: Tensor, shards: Shards, num_rows: int, what: str = SCORES) -> Tensor:
    """Give every rank the rows of all: (n_k, C) -> (n, C)."""
    return _AllRows.apply(x, shards, num_rows, what)  # pyright: ignore[reportReturnType]


def total(x: Tensor, shards: Shards, what: str = SCORES) -> Tensor:
    """Add up what all ranks have, of one shape; each gets the sum."""
    return _Total.apply(x, shards, what)  # pyright: ignore[reportReturnType]


class _ToColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, num_rows: int, heads: int) -> Tensor:  # noqa: ANN401
        ctx.shards, ctx.num_channels, ctx.heads = shards, x.shape[1], heads
        return send_columns(x, shards, num_rows, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return send_rows(grad, ctx.shards, ctx.num_channels, ctx.heads), None, None, None


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, num_channels: int, heads: int) -> Tensor:  # noqa: ANN401
        ctx.shards, ctx.num_rows, ctx.heads = shards, len(x), heads
        return send_rows(x, shards, num_channels, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return send_columns(grad, ctx.shards, ctx.num_rows, ctx.heads), None, None, None


class _AllRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, num_rows: int, what: str) -> Tensor:  # noqa: ANN401
        ctx.shards, ctx.what = shards, what
        return shards.gathered(x, shards.counts(num_rows), what)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        shards: Shards = ctx.shards
        rows = shards.slices(len(grad))
        parts = shards.exchange(
            Contribution(
                copies_of(lambda to: grad[rows[to]][None]),
                [(shards.size, length_of(of_rank), grad.shape[1]) for of_rank in rows],
                lambda of, to: (slice(of, of + 1),),
                grad,
            ),
            ctx.what,
        )
        return parts.sum(0), None, None, None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, what: str) -> Tensor:  # noqa: ANN401
        ctx.shards, ctx.what = shards, what
        return shards.total(x, what)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.shards.total(grad, ctx.what), None, None


def send_columns(x: Tensor, shards: Shards, num_rows: int, heads: int = 1) -> Tensor:
    """Send every rank its columns of this rank's rows; see `to_columns`."""
    by_heads = x.reshape(len(x), heads, x.shape[1] // heads)
    rows, columns = shards.slices(num_rows), shards.slices(by_heads.shape[2])
    y = shards.exchange(
        Contribution(
            copies_of(lambda to: by_heads[:, :, columns[to]]),
            [(num_rows, heads, length_of(of_rank)) for of_rank in columns],
            lambda of, to: (rows[of],),
            x,
        ),
        SWITCHES,
    )
    return y.flatten(1)


def send_rows(x: Tensor, shards: Shards, num_channels: int, heads: int = 1) -> Tensor:
    """Send every rank its rows of this rank's columns; see `to_rows`."""
    by_heads, num = x.reshape(len(x), heads, x.shape[1] // heads), num_channels // heads
    rows, columns = shards.slices(len(x)), shards.slices(num)
    y = shards.exchange(
        Contribution(
            copies_of(lambda to: by_heads[rows[to]]),
            [(length_of(of_rank), heads, num) for of_rank in rows],
            lambda of, to: (_EVERY, _EVERY, columns[of]),
            x,
        ),
        SWITCHES,
    )
    return y.flatten(1)


def length_of(entries: slice) -> int:
    """Return how many entries a slice with both ends has."""
    return entries.stop - entries.start


def cut(entries: slice, number: int) -> list[slice]:
    """Cut a slice with both ends into a number of pieces, of about equal length."""
    ends = [entries.start + length_of(entries) * i // number for i in range(number + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]
