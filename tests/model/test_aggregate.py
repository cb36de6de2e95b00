"""Aggregation over neighbours against gathering them."""

import pytest
import torch

from tests.reference import gathered, max_relative_by_gather
from vigpipe.model.aggregate import max_relative, neighbour_sum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, torch.stack([torch.randperm(7, generator=generator)[:4] for _ in range(21)]).view(
        3, 7, 4
    )


def gradient(values, x):
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((values * weights.to(values)).sum(), x)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_relative_equals_gathering_to_the_last_bit(dtype):
    x, graph = case(dtype)
    assert torch.equal(max_relative(x, graph), max_relative_by_gather(x, graph))


def test_gradient_of_max_relative_equals_gathering():
    x, graph = case()
    expected = gradient(max_relative_by_gather(x, graph), x)
    # Rounding of sums of a few terms in float64.
    torch.testing.assert_close(
        gradient(max_relative(x, graph), x), expected, rtol=1e-12, atol=1e-12
    )


def test_on_a_tie_the_first_neighbour_gets_the_gradient():
    x = torch.tensor([[[1.0], [5.0], [5.0], [5.0]]], requires_grad=True)
    graph = torch.tensor([[[2, 1, 3]] * 4])
    max_relative(x, graph).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [-1.0, -1.0, 3.0, -1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_equals_gathering(dtype):
    x, graph = case(dtype)
    expected = gathered(x.double(), graph).sum(2).to(dtype)
    # Half precision is added up in float32 and rounded once.
    tolerance = 0.0 if dtype.itemsize == 2 else 1e-6
    torch.testing.assert_close(neighbour_sum(x, graph), expected, rtol=tolerance, atol=tolerance)


def test_gradient_of_the_sum_equals_gathering():
    x, graph = case()
    expected = gradient(gathered(x, graph).sum(2), x)
    torch.testing.assert_close(
        gradient(neighbour_sum(x, graph), x), expected, rtol=1e-12, atol=1e-12
    )


def test_images_do_not_mix():
    x, graph = case()
    alone = [max_relative(x[i : i + 1], graph[i : i + 1]) for i in range(3)]
    assert torch.equal(max_relative(x, graph), torch.cat(alone))


def test_strided_features_are_read_right():
    x, graph = case()
    strided = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(max_relative(strided, graph), max_relative(x, graph))
