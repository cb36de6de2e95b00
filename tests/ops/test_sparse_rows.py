"""Products of sparse rows against those of the dense matrix."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.gnn.graphs import from_dense
from vigpipe.ops.sparse_rows import SparseRows, linear


def sparse_rows(x):
    """Store what is not 0."""
    return SparseRows(from_dense(x != 0), x[x != 0])


def matrix(num_rows=20, num_columns=30, share=0.2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_columns, generator=generator, dtype=dtype)
    return x * (torch.rand(x.shape, generator=generator) < share)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(1, 40),
    st.sampled_from(["none", "a row", "rows"]),
    st.booleans(),
)
def test_products_and_gradients_are_those_of_the_dense_matrix(n, d, share, c, added, fused):
    x = matrix(n, d, share)
    sizes: dict[str, Any] = {"none": None, "a row": (c,), "rows": (n, c)}
    inputs = [torch.randn(c, d, dtype=torch.float64, requires_grad=True)]
    if added != "none":
        inputs.append(torch.randn(sizes[added], dtype=torch.float64, requires_grad=True))
    dense = x @ inputs[0].T + (inputs[1] if len(inputs) > 1 else 0)
    grad = torch.randn(n, c, dtype=torch.float64)
    ours = linear(sparse_rows(x), *inputs, fused=fused)
    torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    made, wanted = (torch.autograd.grad(y, inputs, grad) for y in (ours, dense))
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear(x, *inputs), dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("numbers", [[], [0], [2, 3, 17, 29], range(30)])
def test_some_columns_are_those_of_the_dense_matrix(numbers):
    x, numbers = matrix(), torch.tensor([*numbers], dtype=torch.int64)
    some = sparse_rows(x).columns(numbers)
    assert torch.equal(some.dense(), x[:, numbers])
    weight, grad = torch.randn(4, len(numbers), dtype=x.dtype, requires_grad=True), x[:, :4]
    products = linear(some, weight), x[:, numbers] @ weight.T
    made, wanted = (torch.autograd.grad(y, weight, grad) for y in products)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    assert all(some.places.indices[a:b].diff().gt(0).all() for a, b in pairwise(some.places.indptr))


def test_parts_and_the_whole():
    x = matrix()
    rows = sparse_rows(x)
    assert (len(rows), rows.shape) == (20, (20, 30))
    assert torch.equal(rows.dense(), x)
    part = rows.part(3, 11)
    assert torch.equal(part.dense(), x[3:11])
    assert torch.equal(part.part(2, 5).dense(), x[5:8])
    weight = torch.randn(4, 30, dtype=torch.float64)
    torch.testing.assert_close(linear(part, weight), F.linear(x[3:11], weight))


@pytest.mark.parametrize("fused", [True, False])
def test_shapes_that_do_not_fit_are_refused(fused):
    with pytest.raises(ValueError, match=r"weight: the shape is \(4, 29\) instead of \(4, 30\)"):
        linear(sparse_rows(matrix()), torch.randn(4, 29, dtype=torch.float64), fused=fused)
    weight, bias = torch.randn(4, 30, dtype=torch.float64), torch.zeros(3)
    with pytest.raises(ValueError, match=r"bias: the shape is \(3,\) instead of \(4,\)"):
        linear(sparse_rows(matrix()), weight, bias, fused=fused)
