"""Rows in several files, of which only those that are asked for are read."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array, vstack

Rows = np.ndarray | csr_array


class StoredRows:
    """The rows of one large array, or sparse matrix, in k files; indexed like an array.

    `firsts`, (k + 1,) int64, has the first row of each file, then the number of rows. `read` maps
    all rows of a file, given its number; two threads may call it at once. `num_stored` is how many
    numbers sparse rows store; None if the rows are dense.
    """

    def __init__(
        self,
        firsts: np.ndarray,
        shape: tuple[int, ...],
        dtype: type[np.generic],
        read: Callable[[int], Rows],
        num_stored: int | None = None,
    ) -> None:
        self._firsts, self._read = firsts, read
        self.shape, self.dtype, self.num_stored = shape, np.dtype(dtype), num_stored

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> Any:
        """Return the rows of a slice without a step, or of (m,) int64 numbers in any order."""
        if not isinstance(rows, slice):
            return self._at(rows)
        start, end, step = rows.indices(len(self))
        assert step == 1
        file = int(np.searchsorted(self._firsts, start, side="right")) - 1
        pieces = [self._read(0)[:0]] if start >= end else []
        while start < end:
            first, following = (int(row) for row in self._firsts[file : file + 2])
            stop = min(end, following)
            if start < stop:
                pieces.append(self._read(file)[start - first : stop - first])
            start, file = stop, file + 1
        return self._joined(pieces)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype, copy=copy)

    def _at(self, rows: np.ndarray) -> Rows:
        files = np.searchsorted(self._firsts, rows, side="right") - 1
        order = np.argsort(files.astype(np.min_scalar_type(len(self._firsts))), kind="stable")
        used, begins = np.unique(files[order], return_index=True)
        by_file = zip(used.tolist(), np.split(order, begins[1:])[: len(used)], strict=True)
        if self.num_stored is None:
            taken = np.empty((len(rows), *self.shape[1:]), self.dtype)
            for file, of_file in by_file:
                taken[of_file] = self._read(file)[rows[of_file] - self._firsts[file]]  # pyrefly: ignore[unsupported-operation]
            return taken
        pieces = [self._read(file)[rows[of] - self._firsts[file]] for file, of in by_file]
        joined = self._joined(pieces or [self._read(0)[:0]])
        return joined[np.argsort(order)] if len(used) > 1 else joined

    def _joined(self, pieces: Sequence[Any]) -> Any:
        if self.num_stored is not None:
            return pieces[0] if len(pieces) == 1 else csr_array(vstack(pieces, format="csr"))
        joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return joined.astype(self.dtype, copy=False)
