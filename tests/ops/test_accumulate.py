"""Sums in float64: the same bits as torch's, in one pass."""

import pytest
import torch

from vigpipe import ops
from vigpipe.ops.accumulate import accumulate


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert ops.versions("cpu")["knn"].startswith("C++")


@pytest.mark.parametrize("num", [0, 1, 15, 1000, 100_003])
def test_the_bits_are_those_of_torch(num):
    generator = torch.Generator().manual_seed(num)
    terms = [torch.randn(num, generator=generator) * 10**i for i in range(-3, 4)]
    terms[0][num // 2 :] = -0.0
    total, expected = torch.full((num,), torch.nan).double(), torch.zeros(num).double()
    for i, term in enumerate(terms):
        accumulate(total, term, is_first=i == 0)
        expected += term
        assert torch.equal(total.view(torch.int64), expected.view(torch.int64))


@pytest.mark.parametrize(
    ("total", "term"),
    [
        (torch.full((3, 2), torch.nan).double(), torch.arange(6.0).view(2, 3).T),  # with gaps
        (torch.full((3, 2), torch.nan).double(), torch.ones(3, 2).double()),
        (torch.full((3, 2), torch.nan), torch.ones(3, 2).bfloat16()),
    ],
    ids=["strided", "float64", "bfloat16"],
)
def test_other_layouts_and_types_are_added_by_torch(total, term):
    accumulate(total, term, is_first=True)
    accumulate(total, term, is_first=False)
    assert torch.equal(total, (2 * term).to(total.dtype))


def test_what_is_not_finite_stays():
    term = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    total = torch.zeros(4).double()
    accumulate(total, term, is_first=True)
    accumulate(total, -term, is_first=False)
    assert total.isnan().tolist() == [True, True, True, False]
