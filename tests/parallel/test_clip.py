"""Clipping against torch's own, and that the cut changes nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.world import run_ranks
from vigpipe.parallel.clip import clip_gradients

CPU = torch.device("cpu")
ORDER = {"b": 0, "a": 1, "unused": 2, "c": 3}
SHAPES = {"a": (7, 3), "b": (5,), "c": (11,), "unused": (4,)}


def parameters(names=tuple(SHAPES), scale=1.0):
    """Parameters with gradients of very different sizes; `unused` has none."""
    made = {}
    for name in names:
        generator = torch.Generator().manual_seed(ORDER[name])
        made[name] = nn.Parameter(torch.zeros(SHAPES[name], dtype=torch.float64))
        if name != "unused":
            gradient = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
            made[name].grad = gradient * scale * 10.0 ** ORDER[name]
    return made


def gradients(made):
    return {name: p.grad for name, p in made.items() if p.grad is not None}


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_one_process_clips_as_torch_does(max_norm):
    ours, theirs = parameters(), parameters()
    norm = clip_gradients(ours, ORDER, max_norm, None, CPU)
    expected = nn.utils.clip_grad_norm_(list(theirs.values()), max_norm)
    assert norm == pytest.approx(float(expected), rel=1e-12)
    for name, gradient in gradients(theirs).items():
        # torch divides by the norm + 1e-6, which here is 1e-9 of the norm.
        torch.testing.assert_close(gradients(ours)[name], gradient, rtol=1e-8, atol=0)


def test_no_gradients_at_all_have_norm_zero():
    assert clip_gradients(parameters(["unused"]), ORDER, 1.0, None, CPU) == 0.0


def test_float32_norms_are_taken_in_float64():
    """The square of 1e25 is no float32."""
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 1e25)
    assert clip_gradients({"a": parameter}, ORDER, 1.0, None, CPU) == pytest.approx(2e25)
    assert parameter.grad.tolist() == pytest.approx([0.5] * 4)


def clip_a_share(rank, world_size, shares):
    made = parameters(shares[rank])
    norm = clip_gradients(made, ORDER, 0.5, dist.group.WORLD, CPU)
    return norm, gradients(made)


@pytest.mark.multiprocess
def test_two_stages_clip_as_one_to_the_last_bit():
    whole = parameters()
    norm = clip_gradients(whole, ORDER, 0.5, None, CPU)
    results = run_ranks(clip_a_share, 2, [("b", "unused"), ("a", "c")])
    assert [result[0] for result in results] == [norm, norm]
    together = {**results[0][1], **results[1][1]}
    for name, gradient in gradients(whole).items():
        assert torch.equal(together[name], gradient)
