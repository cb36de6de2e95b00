"""Draw the training images that are held out for validation or test, equally of every class."""

import math
from fractions import Fraction

import numpy as np

from vigpipe.data.stored import StoredImages
from vigpipe.errors import InputError


def hold_out(
    images: StoredImages, fraction: float, seed: int, option: str = "--validation"
) -> tuple[StoredImages, StoredImages]:
    """Divide training images into those to train on and those held out, as an option asks.

    A class of n images gives the whole number nearest to fraction × n, halves rounded up, but at
    most n − 1: one image of it stays in training. Which images these are depends only on the seed
    and on the labels in their order, and a larger fraction draws the same images and more. Both
    parts keep their order. If every class is too small to give one, that is an InputError.
    """
    # The bit generator itself gives the same numbers in every version of numpy; what numpy makes of
    # them, such as a permutation, may change, and a resumed run must hold out the same images.
    keys = np.random.PCG64(seed).random_raw(len(images))
    by_class = np.lexsort((keys, images.labels))
    _, starts, counts = np.unique(images.labels[by_class], return_index=True, return_counts=True)
    is_held_out = np.zeros(len(images), dtype=bool)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        is_held_out[by_class[start : start + _num_held_out(count, fraction)]] = True
    if not is_held_out.any():
        raise InputError(f"{option} {fraction}: {_why_nothing(fraction, int(counts.max()))}")
    return images.take(np.flatnonzero(~is_held_out)), images.take(np.flatnonzero(is_held_out))


def _num_held_out(count: int, fraction: float) -> int:
    # In decimals, as the user wrote it: as a binary number, 0.29 × 50 is less than 14.5.
    return min(math.floor(Fraction(str(fraction)) * count + Fraction(1, 2)), count - 1)


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
