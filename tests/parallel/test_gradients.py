"""Sums of gradients: one term needs no more precision, and no more memory."""

import copy

import pytest
import torch
from torch import nn

from vigpipe.parallel import gradients
from vigpipe.parallel.gradients import CompressedGradients, FlatGradients, GradientReducer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_single_micro_batch_is_its_sum_in_any_precision(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.Linear(7, 3)).to(dtype)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=dtype)))
    x = torch.randn(4, 5, dtype=dtype)
    models = [model, copy.deepcopy(model)]
    lean = GradientReducer([models[0]], None, num_microbatches=1)
    double = GradientReducer([models[1]], None, num_microbatches=2)
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


def test_ranks_that_share_a_batch_add_up_before_anything_is_compressed(monkeypatch) -> None:
    """The sum over replicas is one of all ranks' gradients, each of them rounded once."""
    shards = object()

    def all_reduce(buffer: torch.Tensor, group: object) -> None:
        assert group is shards
        buffer.mul_(3)  # as if three ranks had the same

    class Squares:
        def add_up(self, tensors):
            return [tensor.square() for tensor in tensors]

    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 2))]
    reducer = CompressedGradients(parameters, Squares(), shards)  # pyrefly: ignore[bad-argument-type]
    reducer.clear()
    (parameters[0].sum() + 2 * parameters[1].sum()).backward()
    reducer.reduce()
    grads = [parameter.grad for parameter in parameters]
    torch.testing.assert_close(grads, [torch.full((2,), 9.0), torch.full((1, 2), 36.0)])
