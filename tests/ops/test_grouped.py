"""The product of each group of channels against a grouped convolution."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from vigpipe import ops
from vigpipe.model.pointwise import Pointwise

BY_TYPE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def case(dtype, groups):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6 * groups, generator=generator, dtype=torch.float64)
    weight = torch.randn(10 * groups, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "groups", "fused"),
    [(torch.float64, 1, False), (torch.float32, 4, True), (torch.bfloat16, 4, True)],
)
def test_results_and_gradients_are_those_of_a_convolution(dtype, groups, fused):
    x, weight = case(dtype, groups)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = F.conv1d(wide[0].unsqueeze(2), wide[1].unsqueeze(2), groups=groups).squeeze(2)
    found = ops.grouped(x, weight, groups, fused=fused)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = [found, *torch.autograd.grad(found, [x, weight], grad)]
    theirs = [expected, *torch.autograd.grad(expected, wide, grad.double())]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        scale = float(b.detach().abs().max())
        torch.testing.assert_close(a.double(), b, rtol=0, atol=BY_TYPE[dtype] * scale)


def test_under_autocast_features_stay_narrow():
    layer, x = Pointwise(8, 12, groups=4), torch.randn(3, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    wide = layer(x).detach()
    torch.testing.assert_close(y.float(), wide, rtol=0, atol=3e-2 * float(wide.abs().max()))


def test_products_are_counted():
    x, weight = case(torch.float32, 4)
    with FlopCounterMode(display=False) as counter:
        ops.grouped(x, weight, 4).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 50 * 40 * 6
