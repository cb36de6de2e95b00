import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode

from vigpipe.data import transforms
from vigpipe.data.picture import to_array


def picture(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def timm_transform(**options) -> Any:
    """Make a transform from PIL to 0 … 1, bicubic as ours."""
    from timm.data.transforms_factory import create_transform

    return create_transform(**options, interpolation="bicubic", mean=(0.0,) * 3, std=(1.0,) * 3)


def as_tensor(image):
    return torch.tensor(to_array(image)).permute(2, 0, 1) / 255


@pytest.mark.parametrize("size", [(20, 20), (33, 21), (21, 34), (9, 90), (90, 9)])
def test_random_crops_are_those_of_timm(size):
    """Seed Python's generator as ours: timm must cut and resize to the same pixels."""
    theirs = timm_transform(
        input_size=(16, 16), is_training=True, scale=(0.35, 1.0), hflip=0.0, color_jitter=None
    )
    for seed in range(20):
        pixels = picture(size, seed)
        ours = transforms.random_crop(pixels, (16, 16), random.Random(seed), flip=False)
        state = random.getstate()
        random.seed(seed)
        expected = theirs(Image.fromarray(pixels))
        random.setstate(state)
        torch.testing.assert_close(as_tensor(ours), expected)


SIZES = [(20, 20), (33, 21), (21, 34), (50, 40), (16, 64), (64, 17), (224, 150)]
CROPS = [  # each pair of a goal, a share that is kept, and a kind of size
    ((16, 16), 1.0), ((17, 17), 0.9), ((48, 48), 1.0), ((48, 48), 0.875), ((24, 16), 1.0),
    ((24, 16), 0.9), ((17, 40), 1.0), ((17, 40), 0.875),
]  # fmt: skip


@pytest.mark.parametrize(("goal", "crop_pct"), CROPS)
def test_test_images_of_any_shape_are_cut_to_any_shape_as_timm_does(goal, crop_pct):
    theirs = timm_transform(input_size=goal, crop_pct=crop_pct)
    if goal[0] != goal[1]:  # timm 1.0.27 forgets the interpolation there
        theirs.transforms[0].interpolation = InterpolationMode.BICUBIC
    for size in SIZES:
        pixels = picture(size)
        ours = transforms.centre_crop(pixels, goal, crop_pct)
        torch.testing.assert_close(as_tensor(ours), theirs(Image.fromarray(pixels)))


def test_about_half_of_the_images_are_mirrored():
    ramp = np.tile(np.arange(0, 240, 6, dtype=np.uint8)[None, :, None], (40, 1, 3))
    mirrored = 0
    for i in range(400):
        generator = random.Random(transforms.image_seed(0, 0, i))
        crop = to_array(transforms.random_crop(ramp, (8, 8), generator, flip=True))
        mirrored += int(crop[0, 0, 0]) > int(crop[0, -1, 0])
    assert 160 < mirrored < 240  # 200 ± 4 standard deviations


def test_small_images_keep_more_of_their_area():
    assert transforms.crop_scale((64, 32)) == (0.35, 1.0)
    assert transforms.crop_scale((32, 65)) == (0.08, 1.0)
