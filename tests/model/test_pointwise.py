"""Convolutions start as those of the published code do."""

import pytest
import torch

from vigpipe.model.pointwise import Pointwise
from vigpipe.model.stem import ConvStem


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
