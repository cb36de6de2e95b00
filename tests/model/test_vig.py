"""The isotropic ViG against a version with dense convolutions, and against the paper's figures."""

import pytest
import torch

from tests.reference import DenseVig, assert_same_outcome
from vigpipe.model.blocks import VigShape
from vigpipe.model.keyed_dropout import DropPath, KeyedDropout
from vigpipe.model.vig import VisionGnn

SMALL = VigShape((5,), (16,), k=(3, 5))  # on 3x5 nodes; the last block has dilation 2
SMALL_NEIGHBOURS = [(3, 1), (3, 1), (4, 1), (4, 1), (5, 2)]
STEM = [(2, 2), (4, 2), (8, 2), (16, 2), (16, 1)]


def small(**options):
    torch.manual_seed(0)
    return VisionGnn(SMALL, 7, img_size=(48, 80), **options)


def random_images(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "train"), [(torch.float64, True), (torch.float32, False)])
def test_patches_equal_dense_convolutions(dtype, train):
    theirs = DenseVig(16, SMALL_NEIGHBOURS, (3, 5), STEM, 3, 7)
    images = random_images(4, 3, 48, 80)
    assert_same_outcome(small(), theirs, images, dtype, train)


def test_positions_begin_with_zeros():
    assert not small().pos_embed.any()


def test_drop_path_rises_linearly_and_every_mask_has_its_own_stream():
    model = small(drop_path_rate=0.4, drop_rate=0.3)
    masks = [m for m in model.modules() if isinstance(m, DropPath | KeyedDropout)]
    rates = [0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.3]
    assert [mask.rate for mask in masks] == pytest.approx(rates)
    assert [type(mask) for mask in masks] == [DropPath] * 10 + [KeyedDropout]
    assert [mask.stream for mask in masks] == list(range(11))


def test_a_training_step_depends_on_the_keys_and_nothing_else():
    model, images = small(drop_path_rate=0.5, drop_rate=0.5), random_images(4, 3, 48, 80).float()
    keys = torch.tensor([3, 14, 15, 92])
    first = model(images, keys)
    torch.manual_seed(1)
    assert torch.equal(model(images, keys), first)
    assert not torch.equal(model(images, keys + 1), first)


def test_trained_alone_keys_come_from_torchs_generator():
    model, images = small(drop_path_rate=0.5), random_images(4, 3, 48, 80).float()
    torch.manual_seed(1)
    first = model(images)
    assert not torch.equal(model(images), first)
    torch.manual_seed(1)
    assert torch.equal(model(images), first)
