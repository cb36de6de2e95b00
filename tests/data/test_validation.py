"""Which training images are held out, and that they are read as test images are."""

import numpy as np
import pytest
import torch

from tests.refusals import check_refusals
from tests.test_cli import make_pictures
from vigpipe.data import open_source
from vigpipe.data.picture import to_array
from vigpipe.data.stored import StoredImages
from vigpipe.data.validation import hold_out


class Numbers:
    """Images that are their own index, as one pixel."""

    def __call__(self, index: int) -> np.ndarray:
        return np.full((1, 1, 1), index, np.uint8)

    def name_of(self, index: int) -> str:
        return f"image {index}"

    def marks(self) -> tuple[bytes, ...]:
        return ()


def divided(labels, fraction: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """The indices of the images that are left for training, and of those held out."""
    images = StoredImages(np.asarray(labels), Numbers())
    indices = []
    for part in hold_out(images, fraction, seed):
        indices.append([int(to_array(part.load(i)).item()) for i in range(len(part))])
        assert part.labels.tolist() == [labels[i] for i in indices[-1]]
    left, held_out = indices
    return left, held_out


@pytest.mark.parametrize(
    ("fraction", "counts"),
    [
        (0.1, [0, 0, 0, 1, 1, 3, 5]),  # of 1, 2, 4, 5, 10, 25 and 50 images
        (0.29, [0, 1, 1, 1, 3, 7, 15]),  # 14.5, though 0.29 × 50 is less in binary
        (0.999, [0, 1, 3, 4, 9, 24, 49]),
    ],
)
def test_each_class_gives_its_rounded_share_and_keeps_an_image(fraction, counts):
    labels = np.repeat(np.arange(7), [1, 2, 4, 5, 10, 25, 50]).tolist()
    _, held_out = divided(labels, fraction)
    assert np.bincount([labels[i] for i in held_out], minlength=7).tolist() == counts


def test_the_seed_decides_which_images_and_no_version_of_numpy_does():
    labels = [0, 1, 2] * 8
    assert divided(labels, 0.25, seed=0)[1] == [1, 3, 11, 13, 20, 21]
    assert divided(labels, 0.25, seed=1)[1] != divided(labels, 0.25, seed=0)[1]
    assert {1, 3, 11, 13, 20, 21} < set(divided(labels, 0.5, seed=0)[1])  # a larger share has more


def test_a_share_of_nothing_is_one_sentence():
    rows = [
        ([0, 0, 0, 1], 0.16, "0.16: holds no image out, .* class has 3 .* at least 0.167"),
        ([0, 1, 2], 0.9, "0.9: no class has more than one training image"),
    ]
    check_refusals(rows, divided, "--validation ")
    assert len(divided([0, 0, 0, 1], 0.167)[1]) == 1  # what the message advises


@pytest.fixture
def folder(tmp_path):
    return make_pictures(tmp_path / "pictures", 6, 1)


def test_validation_images_are_prepared_as_test_images_are(folder):
    whole = open_source(str(folder), seed=3)
    source = open_source(str(folder), seed=3, augment=True, validation=0.5)
    assert source.validation is not None
    assert source.validation.labels.tolist() == source.train.labels.tolist() == [0] * 3 + [1] * 3
    held_out = source.validation.read(range(6), epoch=1)
    assert torch.equal(held_out, source.validation.read(range(6), epoch=2))
    all_images = whole.train.read(range(12))
    places = [int((all_images == image).flatten(1).all(1).nonzero()) for image in held_out]
    assert places == sorted(places)
    left = open_source(str(folder), seed=3, validation=0.5).train.read(range(6))
    assert torch.equal(left, all_images[[i for i in range(12) if i not in places]])
    assert torch.equal(source.test.read(range(2)), whole.test.read(range(2)))


def test_images_that_cannot_be_read_are_left_out_before_the_draw(folder):
    for i in range(4):
        (folder / "train" / "cat" / f"{i}.png").write_bytes(b"no picture")
    source = open_source(str(folder), validation=0.5, skip_bad_images=True)
    assert source.validation is not None
    assert source.validation.labels.tolist() == [0, 1, 1, 1]
    assert source.train.labels.tolist() == [0, 1, 1, 1]
    assert len(source.bad_images) == 4
