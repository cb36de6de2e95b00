"""The 1x1 convolution and the modules around it, one by one."""

import pytest
import torch
import torch.nn.functional as F

from vigpipe.model.pointwise import Pointwise
from vigpipe.model.readout import Readout
from vigpipe.model.stem import ConvStem


def random_rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_pointwise_equals_a_1x1_convolution(groups):
    layer = Pointwise(8, 12, groups).double()
    torch.nn.init.normal_(layer.bias)
    x = random_rows(3, 5, 8)
    expected = F.conv2d(x.mT[..., None], layer.weight, layer.bias, groups=groups)[..., 0].mT
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    for shape in ((8,), (3, 8), (3, 2, 5, 8)):
        assert layer(random_rows(*shape)).shape == (*shape[:-1], 12)


def test_pointwise_starts_as_the_published_code_does():
    """kaiming_normal_: standard deviation sqrt(2 / fan_in); zero bias."""
    torch.manual_seed(0)
    layer = Pointwise(400, 400, groups=4)
    assert float(layer.weight.detach().std()) == pytest.approx((2 / 100) ** 0.5, rel=0.02)
    assert not layer.bias.any()


def test_the_stem_starts_as_the_published_code_does():
    torch.manual_seed(0)
    conv = ConvStem(64, (128,), (2,), "batch").convs[0]
    assert isinstance(conv, torch.nn.Conv2d)
    assert float(conv.weight.detach().std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    assert conv.bias is not None
    assert not conv.bias.any()


@pytest.mark.parametrize("norm", ["batch", "layer", "group"])
def test_the_stem_makes_one_node_of_each_pixel_of_its_last_map(norm):
    stem = ConvStem(3, (4, 8, 8), (2, 2, 1), norm)
    assert stem(torch.rand(2, 3, 12, 20)).shape == (2, 3, 5, 8)


def test_the_readout_does_not_care_for_the_order_of_the_nodes():
    readout, x = Readout(6, 3, "layer", 0.0, 0).double(), random_rows(4, 7, 5, 6)
    torch.testing.assert_close(readout(x.flip(1), None), readout(x, None), rtol=1e-12, atol=1e-12)
