"""Draw the samples that are held out for validation or test, equally of every class."""

import math
from fractions import Fraction

import numpy as np


def held_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return which samples are held out, (n,) bool, of those with labels (n,).

    A class of n samples gives the whole number nearest to fraction × n, halves rounded up, but at
    most n − 1: one stays in training. Which these are depends only on the seed and on the labels in
    their order, and a larger fraction draws the same samples and more.
    """
    # The bit generator itself gives the same numbers in every version of numpy; what numpy makes of
    # them, such as a permutation, may change, and a resumed run must hold out the same samples.
    keys = np.random.PCG64(seed).random_raw(len(labels))
    by_class = np.lexsort((keys, labels))
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    is_held_out = np.zeros(len(labels), dtype=bool)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        is_held_out[by_class[start : start + _number(count, fraction)]] = True
    return is_held_out


def _number(count: int, fraction: float) -> int:
    # In decimals, as the user wrote it: as a binary number, 0.29 × 50 is less than 14.5.
    return min(math.floor(Fraction(str(fraction)) * count + Fraction(1, 2)), count - 1)
