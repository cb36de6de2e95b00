"""Aggregation over neighbours against gathering them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import gathered, max_relative_by_gather
from vigpipe import ops

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


def max_relative(x, graph, **options):
    return ops.aggregate(x, None, graph, mode="max", **options)


@pytest.fixture(params=["fused", "plain"])
def fused(request):
    assert ops.versions("cpu")["aggregate"].startswith("C++")
    return {"fused": request.param == "fused"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_relative_equals_gathering_to_the_last_bit(dtype, fused):
    x, graph = case(dtype)
    assert torch.equal(max_relative(x, graph, **fused), max_relative_by_gather(x, graph))


def test_on_a_tie_the_first_neighbour_gets_the_gradient(fused):
    x = torch.tensor([[[1.0], [5.0], [5.0], [5.0]]], requires_grad=True)
    graph = torch.tensor([[[2, 1, 3]] * 4])
    max_relative(x, graph, **fused).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [-1.0, -1.0, 3.0, -1.0]


def test_strided_features_are_read_right(fused):
    x, graph = case()
    strided = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(max_relative(strided, graph, **fused), max_relative(x, graph, **fused))


def by_gathering(x, y, graph, weights, mode, interleave):
    """What `ops.aggregate` promises, with a (B, N, K, C) tensor."""
    others = gathered(x if y is None else y, graph)
    if mode == "sum":
        others = others if weights is None else others * weights[..., None]
        pieces = [others.sum(2)]
    else:
        made = {"max": others.max(2).values, "mean": others.mean(2)}
        pieces = [made[name] for name in mode.split("_")]
        pieces = pieces if x is None else [piece - x for piece in pieces]
    pieces = [x, *pieces] if interleave else pieces
    return torch.stack(pieces, -1).flatten(2)


@st.composite
def graphs(draw):
    """Sizes of everything, with or without candidates of their own."""
    num_images, num_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    num_candidates = draw(st.one_of(st.none(), st.integers(1, 20)))
    k, num_channels = draw(st.integers(1, 12)), draw(st.sampled_from([1, 3, 16, 17, 63, 64, 130]))
    return draw(st.integers(0, 2**32)), num_images, num_nodes, num_candidates, k, num_channels


@settings(deadline=None, max_examples=50)
@given(graphs(), st.sampled_from(["max", "mean", "max_mean", "sum"]), st.booleans(), st.booleans())
def test_every_mode_and_its_gradients_equal_gathering(case, mode, interleave, is_relative):
    seed, num_images, num_nodes, num_candidates, k, num_channels = case
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    y = None if num_candidates is None else numbers(num_images, num_candidates, num_channels)
    x = numbers(num_images, num_nodes, num_channels) if is_relative or y is None else None
    weights = numbers(num_images, num_nodes, k) if mode == "sum" else None
    graph = torch.randint(
        num_candidates or num_nodes, (num_images, num_nodes, k), generator=generator
    )
    arguments = (x, y, graph, weights, mode, interleave and x is not None)
    inputs = [t for t in (x, y, weights) if t is not None]
    expected = by_gathering(*arguments)
    # The terms of a sum are few; float64 rounds them in any order.
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    materialized = {"allow_unused": True, "materialize_grads": True}
    wanted = torch.autograd.grad(expected, inputs, grad, **materialized)
    for fused in (True, False):
        found = ops.aggregate(*arguments, fused=fused)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        made = torch.autograd.grad(found, inputs, grad, **materialized)
        for ours, theirs in zip(made, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_more_neighbours_than_a_byte_counts(fused):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 400, 3, generator=generator, dtype=torch.float64).requires_grad_()
    graph = torch.stack([torch.randperm(400, generator=generator) for _ in range(400)])[None]
    found, expected = max_relative(x, graph, **fused), max_relative_by_gather(x, graph)
    assert torch.equal(found, expected)
    torch.testing.assert_close(gradient(found, x), gradient(expected, x), rtol=1e-12, atol=1e-12)


def test_nan_wins_a_maximum():
    x = torch.tensor([[[1.0], [torch.nan], [2.0]]])
    graph = torch.tensor([[[0, 1, 2]] * 3])
    found = ops.aggregate(None, x, graph, mode="max")
    assert found.isnan().all()


@pytest.mark.parametrize("bad", [-1, 7])
def test_an_index_of_no_candidate_is_an_error(bad):
    x, graph = case()
    graph[1, 2, 3] = bad
    with pytest.raises(IndexError, match=r"there are 7 candidates, 0 to 6"):
        ops.aggregate(x, None, graph)


def test_no_images(fused):
    x = torch.zeros(0, 4, 3, requires_grad=True)
    found = max_relative(x, torch.zeros(0, 4, 2, dtype=torch.long), **fused)
    found.sum().backward()
    assert found.shape == (0, 4, 3)


@pytest.mark.parametrize("mode", ["max", "mean", "max_mean", "sum"])
def test_bfloat16_is_rounded_once_when_read_and_once_when_written(mode):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, 70, generator=generator).bfloat16()
    y = torch.randn(2, 30, 70, generator=generator).bfloat16()
    graph = torch.randint(30, (2, 40, 9), generator=generator)
    nodes = None if mode == "sum" else x
    results = []
    for wide in (False, True):
        own, others = (t.float() if wide else t.clone() for t in (x, y))
        own, others = own.requires_grad_(), others.requires_grad_()
        found = ops.aggregate(None if nodes is None else own, others, graph, mode=mode)
        grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        inputs = [others] if nodes is None else [own, others]
        results.append([found, *torch.autograd.grad(found, inputs, grad.to(found.dtype))])
    for narrow, wide in zip(*results, strict=True):
        assert narrow.dtype == torch.bfloat16
        assert torch.equal(narrow, wide.bfloat16())
