"""Draw the training images that are held out for validation or test, equally of every class."""

import math

import numpy as np

from vigpipe.data.stored import StoredImages
from vigpipe.errors import InputError
from vigpipe.job.held_out import held_out


def hold_out(
    images: StoredImages, fraction: float, seed: int, option: str = "--validation"
) -> tuple[StoredImages, StoredImages]:
    """Divide training images into those to train on and those held out, as an option asks.

    Which are held out says `held_out`. Both parts keep their order. If every class is too small to
    give one, that is an InputError.
    """
    is_held_out = held_out(images.labels, fraction, seed)
    if not is_held_out.any():
        largest = int(np.unique(images.labels, return_counts=True)[1].max())
        raise InputError(f"{option} {fraction}: {_why_nothing(fraction, largest)}")
    return images.take(np.flatnonzero(~is_held_out)), images.take(np.flatnonzero(is_held_out))


def _why_nothing(fraction: float, largest: int) -> str:
    if largest == 1:
        return (
            "no class has more than one training image, and one of each stays in training; add "
            "images, or leave the option out"
        )
    return (
        f"holds no image out, for the largest class has {largest} training images, and {fraction} "
        f"of them is less than half an image; choose at least {math.ceil(500 / largest) / 1000:g}, "
        "or add images"
    )
