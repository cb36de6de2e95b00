"""The isotropic ViG against a version with dense convolutions, and against the paper's figures."""

import re

import pytest
import torch

from tests.reference import DenseVig, assert_same_outcome
from vigpipe.model.blocks import VigShape
from vigpipe.model.keyed_dropout import DropPath, KeyedDropout
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn

SMALL = VigShape((5,), (16,), k=(3, 5))  # on 3x5 nodes; the last block has dilation 2
SMALL_NEIGHBOURS = [(3, 1), (3, 1), (4, 1), (4, 1), (5, 2)]


STEM = [(2, 2), (4, 2), (8, 2), (16, 2), (16, 1)]


def small(**options):
    torch.manual_seed(0)
    return VisionGnn(SMALL, 7, img_size=(48, 80), **options)


def random_images(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def neighbours(model):
    return [(spec.rule.k, spec.rule.dilation) for spec in model.specs]


@pytest.mark.parametrize(("dtype", "train"), [(torch.float64, True), (torch.float32, False)])
def test_patches_equal_dense_convolutions(dtype, train):
    theirs = DenseVig(16, SMALL_NEIGHBOURS, (3, 5), STEM, 3, 7)
    images = random_images(4, 3, 48, 80)
    assert_same_outcome(small(), theirs, images, dtype, train)


def test_parameters_have_their_published_names():
    names = {re.sub(r"backbone\.\d+", "backbone.i", name) for name, _ in small().named_parameters()}
    layers = [
        *[f"stem.convs.{i}" for i in (0, 1, 3, 4, 6, 7, 9, 10, 12, 13)],
        *[f"backbone.i.0.{name}" for name in ("fc1.0", "fc1.1", "fc2.0", "fc2.1")],
        *[f"backbone.i.0.graph_conv.gconv.nn.{i}" for i in (0, 1)],
        *[f"backbone.i.1.{name}" for name in ("fc1.0", "fc1.1", "fc2.0", "fc2.1")],
        *[f"prediction.{i}" for i in (0, 1, 4)],
    ]
    both = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert names == both | {"pos_embed"}


def test_neighbours_rise_from_9_to_18_and_dilation_every_fourth_block():
    with torch.device("meta"):
        model = create_model("vig_ti_224", num_classes=1000, img_size=(224, 224))
    ks = [9, 9, 10, 11, 12, 13, 13, 14, 15, 16, 17, 18]
    assert neighbours(model) == list(zip(ks, [1] * 4 + [2] * 4 + [3] * 4, strict=True))


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_without_batchnorm_samples_do_not_meet(norm):
    model, images = small(norm=norm).double(), random_images(4, 3, 48, 80)
    together = model(images)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


def test_initial_logits_are_finite_and_positions_zero():
    model = small()
    assert not model.pos_embed.any()
    assert model(random_images(2, 3, 48, 80).float()).isfinite().all()


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


@pytest.mark.parametrize("size", [(48, 80), (80, 48)])
def test_stem_gives_nodes_in_raster_order(size):
    model = VisionGnn(SMALL, img_size=size).eval()
    images = torch.zeros(1, 3, *size)
    before = model.embed(images)
    images[:, :, -1, 0] = 1.0  # the lower left corner
    moved = (model.embed(images) - before).abs().sum(-1)[0]
    assert moved.shape == (size[0] // 16, size[1] // 16)
    assert moved[-1, 0] > 0
    assert moved[0, -1] == 0
