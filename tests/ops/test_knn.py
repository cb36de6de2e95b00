"""The C++ kNN against plain torch: random shapes, ties, and numbers that are none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.threads import assert_threads_change_nothing
from vigpipe import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert ops.versions("cpu")["knn"].startswith("C++")


def squared_distances(x, y, bias):
    """Float64: (B, N, M)."""
    x, y = (t.double() / t.double().norm(dim=-1, keepdim=True).clamp(min=1e-12) for t in (x, y))
    lengths = x.square().sum(-1)[:, :, None] + y.square().sum(-1)[:, None, :]
    table = lengths - 2 * x @ y.mT
    return table if bias is None else table + bias.double()


def check(x, y, bias, k, dilation, loop):
    """Neighbour by neighbour the same distance as plain torch's choice, up to rounding.

    So the sets are equal wherever the gap behind the last one chosen exceeds rounding.
    """
    found = ops.knn(x, y, bias, k, dilation, loop)
    expected = ops.knn(x, y, bias, k, dilation, loop, fused=False)
    others = x if y is None else y
    assert found.shape == expected.shape == (len(x), x.shape[1], k)
    if found.numel() == 0:
        return
    assert found.min() >= 0
    assert found.max() < others.shape[1]
    table = squared_distances(x, others, bias)
    rounding = 1e-12 if x.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(
        table.gather(2, found), table.gather(2, expected), rtol=0, atol=rounding
    )
    distinct = found.sort(-1).values.diff(dim=-1)
    assert (distinct > 0).all()
    if not loop:
        assert (found != torch.arange(x.shape[1]).view(1, -1, 1)).all()


@st.composite
def cases(draw):
    num_nodes = draw(st.integers(2, 80))
    num_candidates = draw(st.one_of(st.none(), st.integers(2, 80)))
    loop = draw(st.booleans())
    most = (num_candidates or num_nodes) - (not loop)
    k = draw(st.integers(1, most))
    dilation = draw(st.integers(1, most // k))
    num_channels = draw(st.sampled_from([1, 2, 3, 16, 31, 64, 192]))
    shape = draw(st.integers(1, 3)), num_nodes, num_candidates, num_channels
    return draw(st.integers(0, 2**32)), shape, k, dilation, loop, draw(st.booleans())


@settings(deadline=None, max_examples=100)
@given(cases(), st.sampled_from(DTYPES))
def test_any_shape(case, dtype):
    seed, (num_images, num_nodes, num_candidates, num_channels), k, dilation, loop, biased = case
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_images, num_nodes, num_channels, generator=generator, dtype=dtype)
    y = None
    if num_candidates is not None:
        y = torch.randn(num_images, num_candidates, num_channels, generator=generator, dtype=dtype)
    bias = torch.rand(1, num_nodes, num_candidates or num_nodes, generator=generator)
    check(x, y, bias if biased else None, k, dilation, loop)


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_one_node_to_many(dtype):
    """Around the sizes of strips and tiles, and more neighbours than are sorted by counting."""
    for num_nodes in (1, 15, 16, 17, 47, 48, 49, 196, 1500):
        generator = torch.Generator().manual_seed(num_nodes)
        x = torch.randn(2, num_nodes, 10, generator=generator, dtype=dtype)
        for k in {1, min(9, num_nodes), min(196, num_nodes)}:
            check(x, None, None, k, 1, True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_ties_come_by_index_as_in_plain_torch(dtype):
    # Few distinct vectors whose products are exact in every precision, many times over.
    kinds = torch.eye(4)[:, [0, 1, 2, 3, 0]] * torch.tensor([[1.0], [2.0], [0.0], [-4.0]])
    kinds[:, 4] = 0
    choice = torch.randint(4, (2, 150), generator=torch.Generator().manual_seed(0))
    x = kinds[choice].to(dtype)
    for k in (1, 7, 60, 150):
        assert torch.equal(ops.knn(x, None, None, k), ops.knn(x, None, None, k, fused=False)), k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_without_a_finite_length_come_last(dtype):
    for bad in (torch.nan, torch.inf, -torch.inf, 3e38):
        x = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[0, [3, 17]] = bad
        healthy = [i for i in range(40) if i not in (3, 17)]
        graph = ops.knn(x, None, None, 40)
        assert graph[0, healthy, -2:].tolist() == [[3, 17]] * 38, bad
        assert torch.equal(graph[:, healthy], ops.knn(x, None, None, 40, fused=False)[:, healthy])


def test_products_in_the_tiles_of_a_processor_leave_those_of_others_right():
    """oneDNN computes products of bfloat16 in the same registers, in threads of the same pool."""
    x = torch.randn(4, 70, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    product = x @ x.transpose(1, 2)
    for _ in range(3):
        ops.knn(x, None, None, 5)
        assert torch.equal(x @ x.transpose(1, 2), product)


def test_strided_features_are_read_right():
    x = torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    assert torch.equal(ops.knn(x, None, None, 5), ops.knn(x.contiguous(), None, None, 5))


def test_a_bias_for_every_image():
    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(*s, generator=generator) for s in ((3, 20, 6), (3, 20, 20)))
    together = ops.knn(x, None, bias, 4)
    alone = [ops.knn(x[i : i + 1], None, bias[i : i + 1], 4) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3)])
def test_nothing_gives_nothing(shape):
    assert ops.knn(torch.zeros(shape), torch.zeros(shape[0], 5, 3), None, 2).shape == (
        *shape[:2],
        2,
    )


def test_the_number_of_threads_changes_nothing():
    x = torch.randn(3, 100, 20, generator=torch.Generator().manual_seed(0))

    def graphs():
        for part in (slice(3), slice(1), slice(1, 3)):
            yield ops.knn(x[part], None, None, 9, 2)

    assert_threads_change_nothing(graphs)
    whole, *parts = graphs()
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("fused", [True, False])
def test_more_neighbours_than_candidates_are_refused(fused):
    x = torch.zeros(2, 8, 3)
    for y, loop in ((None, False), (torch.zeros(2, 7, 3), True)):
        with pytest.raises(ValueError, match="the 8 nearest of 7 candidates"):
            ops.knn(x, y, None, 4, 2, loop, fused=fused)
