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
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from vigpipe.parallel.shards import Contribution, Shards, copies_of

SWITCHES, SCORES = "switches", "scores"  # what is sent
_Exchange = Callable[[Tensor], Tensor]


def to_columns(x: Tensor, shards: Shards, num_rows: int, heads: int = 1) -> Tensor:
    """Switch from rows to columns of all n rows, with H heads: (n_k, H * c) -> (n, H * c_k)."""
    there = partial(send_columns, shards=shards, num_rows=num_rows, heads=heads)
    back = partial(send_rows, shards=shards, num_channels=x.shape[1], heads=heads)
    return _exchanged(x, there, back)


def to_rows(x: Tensor, shards: Shards, num_channels: int, heads: int = 1) -> Tensor:
    """Switch from columns to rows of all H * c channels: (n, H * c_k) -> (n_k, H * c)."""
    there = partial(send_rows, shards=shards, num_channels=num_channels, heads=heads)
    back = partial(send_columns, shards=shards, num_rows=len(x), heads=heads)
    return _exchanged(x, there, back)


def all_rows(x: Tensor, shards: Shards, num_rows: int, what: str = SCORES) -> Tensor:
    """Give every rank the rows of all: (n_k, C) -> (n, C)."""
    there = partial(shards.gathered, counts=shards.counts(num_rows), what=what)
    return _exchanged(x, there, partial(_sum_rows, shards=shards, what=what))


def total(x: Tensor, shards: Shards, what: str = SCORES) -> Tensor:
    """Add up what all ranks have, of one shape; each gets the sum."""
    add_up = partial(shards.total, what=what)
    return _exchanged(x, add_up, add_up)


def _exchanged(x: Tensor, there: _Exchange, back: _Exchange) -> Tensor:
    """Exchange features, and later their gradients by what leads back."""
    return _Exchanged.apply(x, there, back)


class _Exchanged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Exchange, back: _Exchange) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        return ctx.back(grad), None, None


def _sum_rows(grad: Tensor, shards: Shards, what: str) -> Tensor:
    """Add up what all ranks have for the rows of each rank; see `all_rows`."""
    rows = shards.slices(len(grad))
    shapes = [(shards.size, length_of(of_rank), grad.shape[1]) for of_rank in rows]
    write = copies_of(lambda to: grad[rows[to]][None])
    own = Contribution(write, shapes, lambda of, to: (slice(of, of + 1),), grad)
    return shards.exchange(own, what).sum(0)


def send_columns(x: Tensor, shards: Shards, num_rows: int, heads: int = 1) -> Tensor:
    """Send every rank its columns of this rank's rows; see `to_columns`."""
    by_heads = x.reshape(len(x), heads, x.shape[1] // heads)
    rows, columns = shards.slices(num_rows), shards.slices(by_heads.shape[2])
    shapes = [(num_rows, heads, length_of(of_rank)) for of_rank in columns]
    write = copies_of(lambda to: by_heads[:, :, columns[to]])
    own = Contribution(write, shapes, lambda of, to: (rows[of],), x)
    return shards.exchange(own, SWITCHES).flatten(1)


def send_rows(x: Tensor, shards: Shards, num_channels: int, heads: int = 1) -> Tensor:
    """Send every rank its rows of this rank's columns; see `to_rows`."""
    by_heads, num = x.reshape(len(x), heads, x.shape[1] // heads), num_channels // heads
    rows, columns = shards.slices(len(x)), shards.slices(num)
    shapes = [(length_of(of_rank), heads, num) for of_rank in rows]
    write = copies_of(lambda to: by_heads[rows[to]])
    own = Contribution(write, shapes, lambda of, to: (slice(None), slice(None), columns[of]), x)
    return shards.exchange(own, SWITCHES).flatten(1)


def length_of(entries: slice) -> int:
    """Return how many entries a slice with both ends has."""
    return entries.stop - entries.start


def cut(entries: slice, number: int) -> list[slice]:
    """Cut a slice with both ends into a number of pieces, of about equal length."""
    ends = [entries.start + length_of(entries) * i // number for i in range(number + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]
