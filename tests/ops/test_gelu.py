"""GELU in place: z Phi(z) in double precision, for any number of numbers, layout and thread."""

import pytest
import torch
import torch.nn.functional as F

from vigpipe.ops import gelu
from vigpipe.ops.gelu import gelu_


def exact(x):
    """Phi(z) by erfc: torch's own takes 1 + erf, which loses the digits of negative tails."""
    z = x.double()
    return z * torch.special.erfc(-z * 0.5**0.5) / 2


def numbers(*shape):
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_number_is_right_and_changed_in_place(num_threads):
    torch.set_num_threads(num_threads)
    for num in (0, 1, 7, 16, 31, 64, 65, 1000, 70_001):
        x = numbers(num)
        expected = exact(x)
        near = x.abs() < 3
        y = gelu_(x)
        assert y is x
        # exp(-z^2 / 2) magnifies the rounding of z^2, by 83 at the end of the tail.
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-30)
        torch.testing.assert_close(y[near].double(), expected[near], rtol=2e-6, atol=1e-30)


def test_far_from_zero_it_is_the_number_or_nothing():
    right = torch.tensor([13.0, 30.0, 1e6, 3e38])
    assert torch.equal(gelu_(right.clone()), right)
    left = torch.tensor([-13.0, -30.0, -1e6, -0.0, 0.0])
    torch.testing.assert_close(gelu_(left), torch.zeros(5), rtol=0, atol=1e-30)


def test_what_is_not_finite_stays_so():
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = numbers(40)
        x[33] = bad
        assert gelu_(x).isfinite().sum() == 39, bad


def test_parts_of_a_tensor_are_left_alone():
    whole = numbers(6, 8)
    before = whole.clone()
    torch.testing.assert_close(gelu_(whole[:, :5]), F.gelu(before[:, :5]))
    assert torch.equal(whole, before)


def test_without_a_version_in_c_torch_serves(monkeypatch):
    monkeypatch.setattr(gelu, "can_call", lambda _: False)
    x = numbers(9)
    assert torch.equal(gelu_(x), F.gelu(x))
    assert torch.equal(gelu_(x.double()), F.gelu(x.double()))
