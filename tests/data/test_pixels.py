"""Normalising by a table, and erasing: the bits of the arithmetic on whole batches."""

import numpy as np
import pytest
import torch

from vigpipe.data import pixels
from vigpipe.data.pixels import Erasure, Normalise, Pixels


def arithmetic(images, white, mean, std):
    x = images.contiguous().float().div_(white).clamp_(max=1)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))
    return x.sub_(mean).div_(std)


LOOKS = [
    (255, (0.0,) * 3, (1.0,) * 3),
    (240, (0.0,) * 3, (1.0,) * 3),
    (255, (0.485,) * 3, (0.229,) * 3),
    (255, (0.5,) * 3, (1 / 3,) * 3),
    (255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    (240, (0.5,) * 3, (0.25, 0.5, 0.25)),
]


@pytest.mark.parametrize("look", LOOKS)
def test_the_table_has_the_bits_of_the_arithmetic(look):
    for num_images in (0, 1, 4, 9):
        images = torch.randint(256, (num_images, 3, 40, 25), dtype=torch.uint8)
        parts = [Pixels(part) for part in images.split(4)] if num_images else []
        found = Normalise(*look)(parts, num_images, (3, 40, 25))
        assert torch.equal(found, arithmetic(images, *look))
        doubled = Normalise(*look, dtype=torch.float64)(parts, num_images, (3, 40, 25))
        assert torch.equal(doubled, found.double())


@pytest.mark.parametrize("in_cache", [1, 100, 1 << 20])
def test_it_makes_no_difference_how_much_is_normalised_at_once(in_cache, monkeypatch):
    monkeypatch.setattr(pixels, "_IN_CACHE_BYTES", in_cache)
    images = torch.randint(256, (9, 1, 6, 6), dtype=torch.uint8)
    for send in (None, lambda tensor: tensor):
        found = Normalise(255, (0.1,), (0.2,), send=send)([Pixels(images)], 9, (1, 6, 6))
        assert torch.equal(found, arithmetic(images, 255, (0.1,), (0.2,)))


def test_boxes_are_erased_after_normalising_in_their_image_alone():
    images = torch.full((4, 3, 8, 8), 51, dtype=torch.uint8)
    noise = np.random.default_rng(0).standard_normal((3, 2, 4), dtype=np.float32)
    parts = [Pixels(images[:3]), Pixels(images[3:], (Erasure(0, 5, 1, noise),))]
    found = Normalise(255, (0.0,) * 3, (1.0,) * 3)(parts, 4, (3, 8, 8))
    expected = torch.full((4, 3, 8, 8), 51 / 255)
    expected[3, :, 5:7, 1:5] = torch.from_numpy(noise)
    assert torch.equal(found, expected)


def test_the_result_is_a_tensor_of_its_own():
    """Symptom: images of one channel were taken for channels-last, and convolutions rounded so."""
    images = torch.zeros(2, 4, 4, 1, dtype=torch.uint8).permute(0, 3, 1, 2)
    found = Normalise(255, (0.0,), (1.0,))([Pixels(images)], 2, (1, 4, 4))
    assert found.stride() == (16, 16, 4, 1)
