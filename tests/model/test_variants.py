"""Every variant in stages: what the table in docs/models.md promises of 2 and 4 of them."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from vigpipe.model.keyed_dropout import sample_keys
from vigpipe.model.shapes import SHAPES
from vigpipe.model.variants import create_model
from vigpipe.parallel.plan import even_plan

pytestmark = pytest.mark.filterwarnings("ignore::vigpipe.model.blocks.FewNodesWarning")


def stacked(logits: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.stack(logits) if isinstance(logits, tuple) else logits


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.heavy] * (shape.img_size == (224, 224)))
        for name, shape in SHAPES.items()
        # The others are as those, but larger.
        if "_ti" in name or name in ("vig_digits", "greedyvig_s", "adaptvig_s")
    ],
)
def test_two_and_four_stages_equal_the_whole_bit_for_bit(name):
    """Forward in training mode and backward to the images, on images that are small for it."""
    torch.manual_seed(0)
    side = 64 if SHAPES[name].img_size == (224, 224) else 12
    whole = create_model(name, num_classes=7, img_size=side, drop_path_rate=0.2, drop_rate=0.2)
    images = torch.rand(2, 3, side, side, requires_grad=True)
    keys = sample_keys(0, 0, torch.arange(2))
    expected = stacked(whole(images, keys))
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), images)
    num_blocks = len(whole.numbered_blocks)
    for num_stages in (2, 4):
        plan = even_plan(num_blocks, num_stages)
        x, seen = images, []
        for index, blocks in enumerate(plan.stages):
            stage = deepcopy(whole)
            stage.keep(blocks, stem=plan.is_first(index), readout=plan.is_last(index))
            if index > 0:
                received = x if isinstance(x, tuple) else (x,)
                shapes = tuple(tensor.shape[1:] for tensor in received)
                assert shapes == stage.boundary_shapes(stage.span[0])
            x = stage(x, keys)
            seen += list(stage.state_dict())
        x = stacked(x)
        assert seen == list(whole.state_dict())
        assert torch.equal(x, expected)
        (gradient,) = torch.autograd.grad(x.square().sum(), images)
        assert torch.equal(gradient, expected_gradient)
