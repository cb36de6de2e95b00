"""Sums in float64: the same bits as torch's, in one pass, also of products that come as factors."""

import pytest
import torch

from vigpipe import ops
from vigpipe.ops.double_sum import DoubleSum


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert ops.versions("cpu")["knn"].startswith("C++")


def begun(*shape, dtype=torch.float64) -> DoubleSum:
    own = DoubleSum(torch.full(shape, torch.nan, dtype=dtype))
    own.begin()
    return own


@pytest.mark.parametrize("num", [0, 1, 15, 1000, 100_003])
def test_the_bits_are_those_of_torch(num):
    generator = torch.Generator().manual_seed(num)
    terms = [torch.randn(num, generator=generator) * 10**i for i in range(-3, 4)]
    terms[0][num // 2 :] = -0.0
    own, expected = begun(num), torch.zeros(num).double()
    for term in terms:
        own.add(term)
        expected += term
        assert torch.equal(own.total.view(torch.int64), expected.view(torch.int64))


@pytest.mark.parametrize(
    ("dtype", "term"),
    [
        (torch.float64, torch.arange(6.0).view(2, 3).T),  # with gaps
        (torch.float64, torch.ones(3, 2).double()),
        (torch.float32, torch.ones(3, 2).bfloat16()),
    ],
    ids=["strided", "float64", "bfloat16"],
)
def test_other_layouts_and_types_are_added_by_torch(dtype, term):
    own = begun(3, 2, dtype=dtype)
    own.add(term)
    own.add(term)
    assert torch.equal(own.total, (2 * term).to(dtype))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("before", [0, 2])
def test_factors_are_multiplied_out_at_the_end(before, threads, monkeypatch):
    monkeypatch.setattr("vigpipe.ops.call._GRAIN", 1)
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(before, 5, 16, generator=generator)
    lefts, rights = (torch.randn(3, 4, n, generator=generator).double() for n in (5, 16))
    torch.set_num_threads(threads)
    own, expected = begun(5, 16), torch.zeros(5, 16).double()
    for term in terms:
        own.add(term)
        expected += term
    for left, right in zip(lefts, rights, strict=True):
        own.add_product(left, right)
        expected += (left.T @ right).float()
    own.end()
    torch.testing.assert_close(own.total, expected, rtol=0, atol=1e-6)  # one float32 rounding
    own.begin()
    own.end()
    assert not own.total.any()
