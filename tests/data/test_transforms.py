import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
        torch.testing.assert_close(torch.tensor(to_array(ours)).permute(2, 0, 1) / 255, expected)


@pytest.mark.parametrize("size", [(20, 20), (33, 21), (21, 34), (50, 40), (16, 64), (64, 17)])
@pytest.mark.parametrize("side", [16, 17, 48])
def test_test_images_are_resized_and_cut_as_timm_does(size, side):
    theirs = timm_transform(input_size=side, crop_pct=1.0)
    pixels = picture(size)
    ours = transforms.centre_crop(pixels, (side, side))
    expected = theirs(Image.fromarray(pixels))
    torch.testing.assert_close(torch.tensor(to_array(ours)).permute(2, 0, 1) / 255, expected)


@pytest.mark.parametrize("size", [(20, 20), (33, 21), (16, 64), (224, 150)])
@pytest.mark.parametrize("goal", [(16, 16), (48, 48), (24, 16), (17, 40)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.875])
def test_test_images_of_any_shape_are_cut_to_any_shape_as_timm_does(size, goal, crop_pct):
    theirs = timm_transform(input_size=goal, crop_pct=crop_pct)
    if goal[0] != goal[1]:  # timm 1.0.27 forgets the interpolation there
        theirs.transforms[0].interpolation = InterpolationMode.BICUBIC
    pixels = picture(size)
    ours = transforms.centre_crop(pixels, goal, crop_pct)
    expected = theirs(Image.fromarray(pixels))
    torch.testing.assert_close(torch.tensor(to_array(ours)).permute(2, 0, 1) / 255, expected)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 10**9))
def test_a_random_box_lies_within_the_image(height, width, seed):
    generator = random.Random(seed)
    top, left, h, w = transforms.random_box(height, width, (0.08, 1.0), generator)
    assert 0 <= top < top + h <= height
    assert 0 <= left < left + w <= width


def test_about_half_of_the_images_are_mirrored():
    ramp = np.tile(np.arange(0, 240, 6, dtype=np.uint8)[None, :, None], (40, 1, 3))
    crops = [
        to_array(
            transforms.random_crop(
                ramp, (8, 8), random.Random(transforms.image_seed(0, 0, i)), flip=True
            )
        )
        for i in range(400)
    ]
    mirrored = sum(int(crop[0, 0, 0]) > int(crop[0, -1, 0]) for crop in crops)
    assert 160 < mirrored < 240  # 200 ± 4 standard deviations
