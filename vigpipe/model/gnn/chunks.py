"""Compute on some rows of features at a time."""

from collections.abc import Callable

from torch import Tensor

from vigpipe.model.gnn.layer import Features

_NUMBERS_AT_ONCE = 1 << 23  # of the features that are evaluated at a time


def rows_at_once(x: Features, most: int) -> int:
    """Return how many rows of features to take at a time: fewer where they have many channels."""
    return max(1, min(most, _NUMBERS_AT_ONCE // x.shape[1]))


def part(x: Features, start: int, end: int) -> Features:
    """Return the rows start ... end - 1 of features."""
    return x[start:end] if isinstance(x, Tensor) else x.part(start, end)


def in_chunks(compute: Callable[[int, int], Tensor], num_rows: int, chunk: int) -> Tensor:
    """Concatenate compute(start, end), one chunk of rows after the other."""
    y = compute(0, min(chunk, num_rows))
    if num_rows <= chunk:
        return y
    whole = y.new_empty(num_rows, *y.shape[1:])
    whole[:chunk] = y
    for start in range(chunk, num_rows, chunk):
        end = min(start + chunk, num_rows)
        whole[start:end] = compute(start, end)
    return whole
