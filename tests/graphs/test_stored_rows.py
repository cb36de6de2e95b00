"""Rows in files are those of one array, whatever is asked for and wherever the files end."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from vigpipe.graphs.stored_rows import StoredRows

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


def stored(rows, sizes, num_stored=None):
    firsts = np.concatenate(([0], np.cumsum(sizes)))

    def read(file):
        return rows[firsts[file] : firsts[file + 1]]

    return StoredRows(firsts, rows.shape, np.float32, read, num_stored)


def same(found, expected):
    found, expected = (r.toarray() if isinstance(r, csr_array) else r for r in (found, expected))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["numbers", "dense", "sparse"])
@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, data=st.data())
def test_rows_are_those_of_one_array(kind, sizes, data):
    n = sum(sizes)
    rows: Any = np.arange(n, dtype=np.float32)
    if kind != "numbers":
        rows = (np.arange(4 * n) % 3).astype(np.float32).reshape(n, 4)
    if kind == "sparse":
        rows = csr_array(rows)
    ours = stored(rows, sizes, rows.nnz if kind == "sparse" else None)
    assert (len(ours), ours.shape) == (n, rows.shape)
    start, end = (data.draw(st.integers(0, n)) for _ in range(2))
    same(ours[start:end], rows[start:end])
    same(ours[:], rows)
    chosen = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=8)), np.int64)
    same(ours[chosen], rows[chosen])
    if kind != "sparse":
        same(np.asarray(ours), rows)


def test_only_files_with_such_rows_are_read():
    rows, read = np.arange(12, dtype=np.float32), []

    def read_file(file):
        read.append(file)
        return rows[4 * file : 4 * file + 4]

    ours = StoredRows(np.array([0, 4, 8, 12]), (12,), np.float32, read_file)
    assert (ours[4:8].tolist(), read) == ([4, 5, 6, 7], [1])
    assert np.shares_memory(ours[5:7], rows)  # nothing is copied
    read.clear()
    assert ours[np.array([11, 2, 8])].tolist() == [11, 2, 8]
    assert read == [0, 2]
