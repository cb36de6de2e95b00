"""Labels that a data set stores as numbers, and the names of their classes."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import escaped, is_plain
from vigpipe.files.untrusted import read_text

_LISTS = ("classes.txt", "classnames.txt")  # a name on each line


def check_labels(
    train: np.ndarray, test: np.ndarray, names: Sequence[str] | None, where: str
) -> tuple[str, ...]:
    """Check that labels, (n,) and (m,) int64, count the classes from 0, and name the classes.

    Classes without a name are known by their train images alone, so every one of them needs some.
    They are called by their numbers. Labels or names that are wrong, or none, are an InputError.
    """
    if names is not None:
        _check_names(names, where)
    used = np.unique(train)
    num_classes = len(used) if names is None else len(names)
    for split, labels in (("train", train), ("test", test)):
        if not len(labels):
            raise InputError(
                f"{where}: there are no {split} images, expected at least one; add some"
            )
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
    return tuple(str(label) for label in range(num_classes)) if names is None else tuple(names)


def _check_names(names: Sequence[str], where: str) -> None:
    """Refuse names of classes if one is empty or not text on one line, two are equal, or none."""
    if not names:
        raise InputError(f"{where}: its list of class names is empty; name every class, or none")
    seen: set[str] = set()
    for label, name in enumerate(names):
        if not name.strip() or not is_plain(name):
            raise InputError(
                f"{where}: the name of class {label}, '{escaped(name)}', is empty or has control "
                "characters in it; rename it"
            )
        if name in seen:
            raise InputError(
                f"{where}: two classes are called '{escaped(name)}'; give each a name of its own"
            )
        seen.add(name)


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
