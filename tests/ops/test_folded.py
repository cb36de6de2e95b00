"""Linear, BatchNorm, graph convolution and GELU in one, against one after the other."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ops.called import QUICK
from tests.ops.threads import assert_threads_change_nothing
from vigpipe import ops
from vigpipe.ops import folded
from vigpipe.ops.folded import Convolution, Norm
from vigpipe.ops.grid import grid_neighbour_sum

GRID = (5, 4)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert ops.versions("cpu")["hidden"].startswith("C++")


def case(has_conv, dtype=torch.float64, images=3, grid=GRID, width=16):
    """The tensors that get gradients: x, W, b, scale, shift, second, rel, its bias, root."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(images, grid[0] * grid[1], 3), (width, 3), (width,), (width,), (width,), (3, width)]
    shapes += [(width, width), (width,), (width, width)] if has_conv else []
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    drawn[3] = drawn[3].abs() + 0.5
    return [t.to(dtype).requires_grad_() for t in drawn]


def run(tensors, grid=GRID, fused=True):
    x, weight, bias, scale, shift, second, *rest = tensors
    conv = None
    if rest:
        rel, conv_bias, root = rest
        conv = Convolution(rel, conv_bias, root, grid_neighbour_sum(x, *grid), grid)
    norm = Norm(weight, bias, scale, shift, 1e-5)
    return folded.trained(x, norm, conv, second, fused=fused)


def one_after_the_other(tensors, grid=GRID):
    x, weight, bias, scale, shift, second, *rest = tensors
    z = F.linear(x, weight, bias)
    y = F.batch_norm(z.flatten(0, 1), None, None, scale, shift, training=True).view(z.shape)
    if rest:
        rel, conv_bias, root = rest
        y = F.linear(grid_neighbour_sum(y, *grid), rel, conv_bias) + F.linear(y, root)
    rows = z.flatten(0, 1).double()
    mean = rows.mean(0)
    deviation = (rows - mean).square().sum(0)
    counted = torch.stack((torch.full_like(mean, len(rows)), mean, deviation))
    return F.gelu(y) @ second.T, counted


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("has_conv", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 3e-4)])
def test_results_statistics_and_gradients(has_conv, fused, dtype, tolerance):
    tensors = case(has_conv, dtype)
    (y, counted), (expected, of_rows) = run(tensors, fused=fused), one_after_the_other(tensors)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.testing.assert_close(counted, of_rows.detach(), rtol=tolerance, atol=tolerance)
    assert not counted.requires_grad
    found = (y, *torch.autograd.grad(y, tensors, grad))
    theirs = (expected, *torch.autograd.grad(expected, tensors, grad))
    scale = max(float(t.detach().abs().max()) for t in theirs[1:])
    for a, b in zip(found, theirs, strict=True):
        assert (a - b).abs().max() <= tolerance * max(scale, float(b.detach().abs().max()))


# The check itself reads gradients of copies that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("has_conv", [True, False])
def test_torch_finds_nothing_wrong_with_it(has_conv):
    x, weight, bias, scale, shift, second, *rest = (t.detach() for t in case(has_conv))
    total = grid_neighbour_sum(x, *GRID) if rest else None
    conv, grid = (rest, GRID) if rest else ([None] * 3, (0, 0))
    arguments = [x, total, weight, bias, scale, shift, 1e-5, *conv, second, *grid]
    leaves = [t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments]
    checks: dict[str, Any] = {"test_utils": QUICK} if has_conv else {}
    torch.library.opcheck(torch.ops.vigpipe.folded.default, tuple(leaves), **checks)


def test_the_number_of_threads_changes_nothing():
    tensors = case(True, torch.float32, images=9, grid=(32, 32), width=64)

    def outcome():
        y, counted = run(tensors, (32, 32))
        return y, counted, *torch.autograd.grad(y.square().sum(), tensors)

    assert_threads_change_nothing(outcome)


def test_statistics_survive_a_large_mean():
    tensors = case(False, torch.float32)
    far = [(tensors[0] + 1000).detach(), *tensors[1:]]
    _, counted = run(far)
    wide = [t.detach().double() for t in far]
    torch.testing.assert_close(counted, one_after_the_other(wide)[1], rtol=1e-9, atol=0)


def test_evaluation_takes_given_statistics():
    x, weight, bias, scale, shift, second = case(False)
    mean, variance = torch.randn(16, dtype=torch.float64), torch.rand(16, dtype=torch.float64)
    norm = Norm(weight, bias, scale, shift, 1e-3)
    found = folded.evaluated(x, norm, None, second, mean, variance)
    z = F.batch_norm(
        F.linear(x, weight, bias).flatten(0, 1), mean, variance, scale, shift, eps=1e-3
    )
    torch.testing.assert_close(found, (F.gelu(z) @ second.T).view(x.shape))
