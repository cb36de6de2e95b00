"""The usual formulation of the models, which ours are compared with, is the same model."""

import pytest
import torch

from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.selftest.reference import ReferenceVig


@pytest.mark.heavy
def test_the_reference_is_the_same_model():
    torch.manual_seed(0)
    model = create_model("pvig_cifar_ti", num_classes=5).double().train()
    assert isinstance(model, VisionGnn)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    reference = ReferenceVig(model).double().train()
    torch.testing.assert_close(reference(images), model(images), rtol=1e-9, atol=1e-9)
