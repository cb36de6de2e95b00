"""The sum over neighbours on a grid, against a loop over its edges; C++ with the bits of torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import grid_edges, sum_over_edges
from vigpipe.ops import grid
from vigpipe.ops.grid import grid_neighbour_sum


def features(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 2), st.integers(1, 3))
def test_grid_sum_equals_the_sum_over_its_edges(height, width, batch, channels):
    x = features(height * 10 + width, batch, height * width, channels)
    expected = sum_over_edges(x, grid_edges(height, width))
    torch.testing.assert_close(grid_neighbour_sum(x, height, width), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (3, 5, 1, 2), (2, 1, 4, 3), (5, 32, 32, 3)])
def test_c_adds_in_the_order_of_torch(shape, dtype, monkeypatch):
    batch, height, width, channels = shape
    x = features(0, batch, height * width, channels).to(dtype)
    x[0, 0] = -0.0
    # Of other strides, and gradients of the sum.
    inputs = [x, x.transpose(0, 1).contiguous().transpose(0, 1)]
    got = [sum_and_gradient(one, height, width) for one in inputs]
    monkeypatch.setattr(grid, "can_call", lambda _: False)
    for ours in got:
        for one, other in zip(ours, sum_and_gradient(x, height, width), strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one.signbit(), other.signbit())


def sum_and_gradient(x, height, width):
    x = x.detach().requires_grad_()
    y = grid_neighbour_sum(x, height, width)
    y.backward(y.detach() * 3)
    assert x.grad is not None
    return y.detach(), x.grad
