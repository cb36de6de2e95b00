"""BatchNorm, GELU and residual in one against torch's layers, one after the other."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ops.threads import assert_threads_change_nothing
from vigpipe import ops


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert ops.versions("cpu")["norm"].startswith("C++")


def one_after_the_other(x, weight, bias, residual, sample_scale, gelu):
    rows = x.flatten(0, -2)
    y = F.batch_norm(rows, None, None, weight, bias, training=True).view(x.shape)
    y = F.gelu(y) if gelu else y
    y = y if sample_scale is None else y * sample_scale.view(-1, *[1] * (x.dim() - 1))
    y = y if residual is None else residual + y
    return y, rows.mean(0), rows.var(0, correction=0)


def case(seed, shape, dtype, what):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    x = (3 * numbers(*shape) + 5 * numbers(shape[-1])).to(dtype).requires_grad_()
    weight, bias = (numbers(shape[-1]).to(dtype).requires_grad_() for _ in range(2))
    residual: Any = None if what == "alone" else numbers(*shape).to(dtype).requires_grad_()
    sample_scale = numbers(shape[0]).to(dtype) if what == "strength" else None
    return (x, weight, bias, residual, sample_scale), numbers(*shape).to(dtype)


SHAPES = [(1, 2, 1), (2, 7, 5), (3, 16, 3), (2, 300, 24), (2, 5, 5, 64), (4, 33, 130), (7, 48)]


# What is added, whether there is a GELU, and the type: all pairs of them.
CASES = [
    *(("alone", False, torch.float64), ("alone", True, torch.float32)),
    *(("residual", True, torch.float64), ("residual", False, torch.float32)),
    *(("strength", True, torch.float64), ("strength", False, torch.float32)),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_results_statistics_and_gradients(shape):
    for what, gelu, dtype in CASES:
        tolerance = 1e-11 if dtype == torch.float64 else 3e-4
        (x, weight, bias, residual, sample_scale), grad = case(0, shape, dtype, what)
        found = ops.norm(x, weight, bias, residual, sample_scale, gelu=gelu)
        expected = one_after_the_other(x, weight, bias, residual, sample_scale, gelu)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=False
            )
        inputs = [t for t in (x, weight, bias, residual) if t is not None]
        ours = torch.autograd.grad(found[0], inputs, grad)
        theirs = torch.autograd.grad(expected[0], inputs, grad)
        for a, b in zip(ours, theirs, strict=True):
            scale = tolerance * max(1.0, float(b.detach().abs().max()))
            torch.testing.assert_close(a, b, rtol=0, atol=scale)


@pytest.mark.parametrize("fused", [True, False])
def test_a_single_row_gives_the_bias(fused):
    x, weight, bias = torch.randn(1, 1, 6), torch.rand(6), torch.rand(6)
    y, mean, variance = ops.norm(x, weight, bias, fused=fused)
    # A variance of 0 makes a scale of 316, which rounding is multiplied by.
    torch.testing.assert_close(y.flatten(), bias, rtol=0, atol=3e-4)
    assert torch.equal(mean, x.flatten().double())
    assert torch.equal(variance, torch.zeros(6, dtype=torch.float64))


def test_statistics_survive_a_large_mean():
    x = torch.randn(1, 5000, 20, generator=torch.Generator().manual_seed(0)) + 1000
    _, mean, variance = ops.norm(x, torch.ones(20), torch.zeros(20))
    exact = x.double().flatten(0, 1)
    torch.testing.assert_close(mean, exact.mean(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(variance, exact.var(0, correction=0), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("gelu", "is_wide"), [(False, True), (True, False)])
def test_bfloat16_is_rounded_once_when_read_and_once_when_written(gelu, is_wide):
    (x, weight, bias, residual, _), grad = case(0, (4, 33, 130), torch.float32, "residual")
    x = x.detach().bfloat16()
    residual = residual.detach() if is_wide else None
    grad = grad if is_wide else grad.bfloat16()
    results = []
    for features in (x, x.float()):
        features.requires_grad_()
        y, mean, variance = ops.norm(features, weight, bias, residual, gelu=gelu)
        of_y = torch.autograd.grad(y, [features, weight, bias], grad.to(y.dtype))
        results.append((y, mean, variance, *of_y))
    (y, *statistics, d_x, d_weight, d_bias), (of_wide, *expected, d_wide, d_w, d_b) = results
    assert torch.equal(y, of_wide if is_wide else of_wide.bfloat16())
    assert torch.equal(d_x, d_wide.bfloat16())
    for ours, theirs in zip((*statistics, d_weight, d_bias), (*expected, d_w, d_b), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fused", [True, False])
def test_a_bias_before_the_norm_changes_the_mean_alone(fused):
    (x, weight, bias, *_), grad = case(0, (2, 30, 20), torch.float64, "alone")
    before = torch.randn(20, dtype=torch.float64, requires_grad=True)
    added, missing = (
        ops.norm(x + before, weight, bias, fused=fused),
        ops.norm(x, weight, bias, before=before, fused=fused),
    )
    for a, b in zip(added, missing, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    inputs = [x, weight, bias, before]
    for a, b in zip(
        torch.autograd.grad(added[0], inputs, grad),
        torch.autograd.grad(missing[0], inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not torch.autograd.grad(ops.norm(x, weight, bias, before=before)[0].sum(), before)[
        0
    ].any()


def test_nan_is_not_hidden():
    x = torch.randn(1, 50, 4)
    x[0, 30, 2] = torch.nan
    y, mean, _ = ops.norm(x, torch.ones(4), torch.zeros(4), gelu=True)
    assert y[..., 2].isnan().all()
    assert mean[2].isnan()
    assert y[..., [0, 1, 3]].isfinite().all()


def test_the_number_of_threads_changes_nothing():
    (x, weight, bias, residual, _), grad = case(0, (2, 700, 40), torch.float32, "residual")

    def outcome():
        y = ops.norm(x, weight, bias, residual, gelu=True)
        return *y, *torch.autograd.grad(y[0], [x, weight, bias, residual], grad)

    assert_threads_change_nothing(outcome, (1, 2, 7))
