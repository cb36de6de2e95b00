"""timm's augmentation: its own pixels, from a seed, with nothing left behind."""

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform

from tests.refusals import check_refusals
from vigpipe.data import Augmentation, open_source, transforms
from vigpipe.data.augment import TimmAugment, keep_one_bit
from vigpipe.data.picture import to_array
from vigpipe.data.pixels import Normalise, Pixels

FULL = Augmentation("box", "rand-m9-mstd0.5-inc1", 0.4, 0.25)
SHIFT = Augmentation("shift", "none", 0.0, 0.0)


def picture(size, seed=0, channels=3):
    """Smooth enough that resizing and rotating leave something to compare."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, channels), dtype=np.uint8)
    return to_array(transforms.centre_crop(coarse, size))


NORMALISE = Normalise(255, (0.5,) * 3, (0.5,) * 3)


def augmented(ours, images, seeds):
    """What a model sees: augmented, normalised, and then erased."""
    pixels, erasures = ours(images, seeds)
    stacked = torch.from_numpy(np.stack([to_array(p) for p in pixels])).permute(0, 3, 1, 2)
    return NORMALISE([Pixels(stacked, erasures)], len(pixels), stacked.shape[1:])


def states():
    state: Any = np.random.get_state()
    of_torch = torch.random.get_rng_state().tolist()
    return random.getstate(), state[1].tolist(), state[2], of_torch


def test_a_seeded_image_is_the_one_of_timm():
    """The published transform as timm makes it, its erasing after normalisation included."""
    make: Any = create_transform
    theirs = make(
        input_size=(96, 96),
        is_training=True,
        color_jitter=0.4,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="random",
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        re_prob=0.25,
        re_mode="pixel",
    )
    ours = TimmAugment(FULL, (96, 96), (0.5,) * 3, flip=True)
    for step in theirs.transforms:
        keep_one_bit(step)
    for seed in range(40):
        pixels = picture((110, 130), seed)
        (image,) = augmented(ours, [pixels], [seed])
        state = random.getstate()
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        expected = theirs(Image.fromarray(pixels))
        torch.testing.assert_close(image, expected, atol=1e-6, rtol=1e-6)
        random.setstate(state)


def test_posterizing_to_no_bit_at_all_keeps_one():
    """RandAugment m9-mstd0.5 asks for 0 bits now and then; Pillow 13 then raised ValueError."""
    strongest = Augmentation(auto_augment="rand-m10-n1-inc1")
    ours = TimmAugment(strongest, (8, 8), (0.5,) * 3, flip=False)
    x = augmented(ours, [picture((8, 8), i) for i in range(200)], range(200))
    assert any(image.unique().numel() == 2 for image in x)
    assert not any(bool((image == -1).all()) for image in x)


@pytest.mark.parametrize("augmentation", [FULL, SHIFT])
def test_images_depend_on_their_seeds_only_and_leave_no_trace(augmentation):
    ours = TimmAugment(augmentation, (16, 24), (0.5,) * 3, flip=True)
    pixels = [picture((20, 30), i) for i in range(12)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = states()
    together = augmented(ours, pixels, range(12))
    assert together.shape == (12, 3, 16, 24)
    assert states() == before
    torch.rand(3)
    apart = [augmented(ours, [pixels[i]], [i])[0] for i in reversed(range(12))]
    assert torch.equal(torch.stack(apart[::-1]), together)
    again = augmented(ours, pixels, range(1, 13))
    assert sum(torch.equal(a, b) for a, b in zip(again, together, strict=True)) == 0


def test_generators_come_back_after_an_error_too():
    ours = TimmAugment(FULL, (16, 16), (0.5,) * 3, flip=True)
    before = states()
    with pytest.raises(IndexError):
        ours([picture((16, 16))[:, :, 0]], [0])  # without channels
    assert states() == before
    assert augmented(ours, [picture((16, 16))], [0]).shape == (1, 3, 16, 16)


def test_a_shifted_image_is_a_window_of_the_reflected_one():
    ours = TimmAugment(SHIFT, (16, 32), (0.5,) * 3, flip=False)
    pixels = picture((16, 32), 1)
    padded = np.pad(pixels, ((2, 2), (4, 4), (0, 0)), mode="reflect")
    windows = {padded[y : y + 16, x : x + 32].tobytes(): (y, x) for y in range(5) for x in range(9)}
    found = {windows[image.tobytes()] for image in ours([pixels] * 200, range(200))[0]}
    assert len(found) > 35  # of 45


def test_greys_pass_through_every_operation():
    ours = TimmAugment(FULL, (8, 8), (0.5,), flip=False)
    x = augmented(ours, [picture((8, 8), i, 1) for i in range(300)], range(300))
    assert x.shape == (300, 1, 8, 8)
    assert torch.isfinite(x).all()


def test_an_unknown_augmentation_is_named():
    rows = [(n, f"--auto-augment {n}: timm knows no such") for n in ("rand-x9", "nonsense")]
    check_refusals(rows, lambda n: open_source("digits", augment=Augmentation(auto_augment=n)))


def test_a_source_augments_train_images_by_seed_epoch_index_and_copy():
    def read(seed=5, epoch=2, copies=(0, 0)):
        source = open_source("fake", image_size=32, seed=seed, augment=FULL, mean=0.5, std=0.5)
        pixels = open_source("fake", image_size=32, seed=5, augment=FULL)
        source.train._load = pixels.train._load
        return source.train.read([3, 8], epoch, copies)

    first = read()
    assert torch.equal(read(), first)
    for other in (read(seed=6), read(epoch=3), read(copies=(1, 1))):
        assert not torch.equal(other[0], first[0])
        assert not torch.equal(other[1], first[1])
    assert torch.equal(read(copies=(0, 4))[0], first[0])
    plain = open_source("fake", image_size=32, seed=5, mean=0.5, std=0.5).test
    augmented = open_source("fake", image_size=32, seed=5, augment=FULL, mean=0.5, std=0.5).test
    assert torch.equal(augmented.read([1, 2], epoch=4), plain.read([1, 2]))


@pytest.mark.parametrize("augment", [FULL, True])
def test_a_pickled_split_reads_the_same(augment):
    split = open_source("fake", image_size=(12, 20), augment=augment).train
    split.read([0])
    copy = pickle.loads(pickle.dumps(split))
    assert torch.equal(copy.read([4, 2, 9], 1, [0, 1, 2]), split.read([4, 2, 9], 1, [0, 1, 2]))
