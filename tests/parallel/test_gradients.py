"""Sums of gradients: one term needs no more precision, and no more memory."""

import copy

import pytest
import torch
from torch import nn

from vigpipe.parallel.gradients import FlatGradients, Replicas


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_single_micro_batch_is_its_sum_in_any_precision(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.Linear(7, 3)).to(dtype)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=dtype)))
    x = torch.randn(4, 5, dtype=dtype)
    models = [model, copy.deepcopy(model)]
    lean = Replicas([models[0]], None, num_microbatches=1)
    double = Replicas([models[1]], None, num_microbatches=2)
    assert isinstance(lean.gradients, FlatGradients)
    for _ in range(2):  # the second time over the first
        for replicas, own in zip((lean, double), models, strict=True):
            replicas.gradients.clear()
            own(x).square().sum().backward()
            replicas.gradients.reduce()
        for one, other in zip(*(m.parameters() for m in models), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
