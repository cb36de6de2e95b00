"""Features of a graph's nodes, in memory or in files: some of their rows or columns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vigpipe.ops.sparse_rows import SparseRows

# (n, C): a Tensor; or, in the first layer, SparseRows, or anything with a shape whose
# `part(start, end)` are the features of some nodes, such as features in files.
AnyFeatures = Any

_NUMBERS_AT_ONCE = 1 << 23  # most numbers of features that are evaluated at a time


def slice_rows(x: AnyFeatures, start: int, end: int) -> AnyFeatures:
    """Return the rows start ... end - 1 of features."""
    return x[start:end] if isinstance(x, Tensor) else x.part(start, end)


def first_rows(x: AnyFeatures, num: int) -> AnyFeatures:
    """Return the first rows of features: (n, C) -> (num, C)."""
    return x if len(x) == num else slice_rows(x, 0, num)


def rows_at_once(x: AnyFeatures, most: int) -> int:
    """Return how many rows of features to take at a time: fewer where they have many channels."""
    return max(1, min(most, _NUMBERS_AT_ONCE // x.shape[1]))


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


def dense(x: AnyFeatures, chunk: int) -> Tensor:
    """Return features in memory, with all numbers, (n, d), reading a chunk of rows at a time."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, SparseRows):
        return x.dense()
    rows = rows_at_once(x, chunk)
    return in_chunks(lambda start, end: dense(slice_rows(x, start, end), chunk), len(x), rows)


def select_columns(x: AnyFeatures, columns: Tensor) -> AnyFeatures:
    """Return some columns of features, (c,) int64, ascending; of features in files when read."""
    if isinstance(x, Tensor):
        return x.index_select(1, columns)
    return x.columns(columns) if isinstance(x, SparseRows) else _Columns(x, columns)


@dataclass(frozen=True)
class _Columns:
    rows: AnyFeatures
    columns: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    def part(self, start: int, end: int) -> AnyFeatures:
        return select_columns(slice_rows(self.rows, start, end), self.columns)
