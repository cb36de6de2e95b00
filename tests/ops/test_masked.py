"""Dropout and ReLU: the same bits as in plain torch, gradients too, whatever the size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vigpipe.ops.masked import dropped, relu

dtypes = st.sampled_from([torch.float32, torch.float64])
sizes = st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 7, 8, 64, 257, 300]))


def numbers(shape, dtype, seed=0):
    """With zeros, negative zeros and what is not finite among them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf], dtype=dtype)
    flat = x.flatten()
    flat[: len(special)] = special[: len(flat)]
    return flat.view(shape)


def outcome(function, x):
    """The result, and the gradient of its product with fixed numbers."""
    x = x.detach().requires_grad_()
    y = function(1 * x)  # not a leaf
    return y.detach(), *torch.autograd.grad(
        y, x, torch.linspace(-3, 3, y.numel(), dtype=y.dtype).view(y.shape)
    )


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=50, deadline=None)
@given(sizes, dtypes, st.integers(-(1 << 15), (1 << 15) - 1), st.integers(0, 1 << 40))
def test_what_is_dropped_is_the_same(shape, dtype, threshold, first):
    rows = torch.randint(-(2**62), 2**62, shape[:1], generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        outcome(
            lambda x, f=f: dropped(x, rows, first, threshold, 1.25, fused=f), numbers(shape, dtype)
        )
        for f in (True, False)
    )
    assert_same(ours, theirs)


@settings(max_examples=50, deadline=None)
@given(sizes, dtypes)
def test_relu_is_that_of_torch(shape, dtype):
    ours = outcome(relu, numbers(shape, dtype))
    assert_same(ours, outcome(torch.relu, numbers(shape, dtype)))
    assert_same(ours, outcome(lambda x: relu(x, fused=False), numbers(shape, dtype)))


def test_relu_of_a_leaf_and_of_a_view_leave_it_as_it_is():
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    assert relu(x).tolist() == [0, 2]
    assert x.tolist() == [-1, 2]
    inner = 1 * x
    assert relu(inner[:1]).tolist() == [0]
    assert inner.tolist() == [-1, 2]


def test_relu_takes_the_memory_of_what_nothing_else_needs():
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    inner = 2 * x
    y = relu(inner)
    assert y.data_ptr() == inner.data_ptr()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2]


def test_what_a_backward_needs_is_not_overwritten_silently():
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    inner = x.exp()  # whose backward needs its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        relu(inner).sum().backward()
