"""A few of the digits as --data: evaluating all 360 is most of a short run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

NUM_TRAIN, NUM_TEST = 144, 24
SMALL_DIGITS = ("--data", "digits.npz", "--model", "vig_digits")  # in the folder with the file


def write_small_digits(folder: Path) -> None:
    """Write digits.npz into a folder."""
    digits: Any = load_digits()
    images, labels = digits.data, digits.target
    images = (images * 15).astype(np.uint8).reshape(-1, 8, 8)
    train, test = slice(NUM_TRAIN), slice(NUM_TRAIN, NUM_TRAIN + NUM_TEST)
    np.savez(
        folder / "digits.npz",
        x_train=images[train],
        y_train=labels[train],
        x_test=images[test],
        y_test=labels[test],
    )


@contextlib.contextmanager
def among_small_digits(folder: Path) -> Iterator[None]:
    """Write digits.npz into a folder, and work there."""
    write_small_digits(folder)
    with contextlib.chdir(folder):
        yield
