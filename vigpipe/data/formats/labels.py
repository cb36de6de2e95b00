"""Labels that a data set stores as numbers or as texts, and the names of their classes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import check_class_names, escaped, first_few, is_plain
from vigpipe.files.untrusted import read_text

_LISTS = ("classes.txt", "classnames.txt")  # a name on each line


class Labels(NamedTuple):
    """The labels of the images, (n,) and (m,) int64, and the names of the classes."""

    train: np.ndarray
    test: np.ndarray
    names: tuple[str, ...]


def check_labels(
    train: np.ndarray, test: np.ndarray, names: Sequence[str] | None, where: str
) -> Labels:
    """Check that labels, (n,) and (m,), are texts, or int64 that count the classes from 0.

    Classes without a name are known by their train images alone, so every one of them needs some.
    They are called by their numbers or, if labels are texts, by these, in alphabetical order.
    Labels or names that are wrong, or none, are an InputError.
    """
    for split, labels in (("train", train), ("test", test)):
        if not len(labels):
            raise InputError(
                f"{where}: there are no {split} images, expected at least one; add some"
            )
    are_texts = {labels.dtype.kind in "UO" for labels in (train, test)}
    if len(are_texts) > 1:
        raise InputError(
            f"{where}: of the train and the test labels, one are texts and one are numbers; store "
            "both as texts"
        )
    if are_texts == {True} and names is None:
        names = [str(name) for name in np.unique(train)]
    if names is not None:
        if not names:
            raise InputError(
                f"{where}: its list of class names is empty; name every class, or none"
            )
        check_class_names(names, where)
    if are_texts == {True}:
        assert names is not None
        train = _number(train, names, "train", where)
        test = _number(test, names, "test", where)
    used = np.unique(train)
    num_classes = len(used) if names is None else len(names)
    for split, labels in (("train", train), ("test", test)):
        if labels.min() < 0:
            raise InputError(
                f"{where}: {split} image {labels.argmin()} has the label {labels.min()}, but "
                "classes count from 0; leave images of unknown class out, or take another split"
            )
    if names is None and used[-1] >= num_classes:
        gap = int(np.flatnonzero(used != np.arange(num_classes))[0])
        raise InputError(
            f"{where}: train labels go up to {used[-1]}, but no train image has label {gap}; "
            "number the classes 0, 1, 2 and so on without a gap"
        )
    for split, labels in (("train", train), ("test", test)):
        if labels.max() >= num_classes:
            raise InputError(
                f"{where}: {split} image {labels.argmax()} has the label {labels.max()}, but with "
                f"{num_classes} classes labels are 0 … {num_classes - 1}; mend the labels"
            )
    if names is None:
        names = [str(label) for label in range(num_classes)]
    return Labels(train, test, tuple(names))


def _number(labels: np.ndarray, names: Sequence[str], split: str, where: str) -> np.ndarray:
    """Give each of the texts the position of its class: (n,) int64."""
    texts, of_image = np.unique(labels, return_inverse=True)
    number_of = {name: number for number, name in enumerate(names)}
    for text in map(str, texts):
        if text not in number_of:
            image = int((labels == text).argmax())
            raise InputError(
                f"{where}: {split} image {image} has the label '{escaped(text)}', which is none "
                f"of the {len(names)} classes ({first_few(names)}); mend the labels"
            )
    return np.array([number_of[str(text)] for text in texts], dtype=np.int64)[of_image.reshape(-1)]


def listed_names(folder: Path) -> tuple[str, ...] | None:
    """Read the list of class names in a folder, classes.txt or classnames.txt, if there is one."""
    for path in (folder / name for name in _LISTS):
        if os.path.exists(path):
            names = tuple(line.strip() for line in read_text(path).rstrip().split("\n"))
            for number, name in enumerate(names, start=1):
                if not name or not is_plain(name):
                    raise InputError(
                        f"{path}: line {number} is '{escaped(name)}', expected the name of class "
                        f"{number - 1}; correct the list"
                    )
            return names
    return None
