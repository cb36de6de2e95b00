"""Labels of nodes as people save them, and whether a model can be trained on them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import check_class_names, escaped
from vigpipe.graphs.graph import NO_CLASS, NO_SPLIT, TEST, TRAIN, UNKNOWN

MOST_CLASSES = 1 << 20  # of a graph that is not trained on
_MOST_EXACT = 1 << 53  # float64 has every whole number up to this one


class Labels(NamedTuple):
    """What is known of the classes of nodes."""

    of_nodes: np.ndarray  # as `Graph` has them
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what the user should read before a run


def read_labels(
    labels: np.ndarray,
    split: np.ndarray | None,
    class_names: Sequence[str] | None,
    where: str,
    *,
    multi_label: bool,
    trains: bool = True,
) -> Labels:
    """Read labels, (n,) numbers or names of classes, or (n, C) zeros and ones.

    Names of classes are sorted if there are no `class_names`. Unless `multi_label`, zeros and ones
    that give each node of the split, (n,) int8, one class are read as this class; without a split,
    if they give each node one or none. Among zeros and ones, NaN and -1 stand for what is not
    known. Messages begin with `where`.
    """
    notes: tuple[str, ...] = ()
    if labels.ndim == 2 and labels.shape[1] == 1 and not multi_label:
        labels = labels[:, 0]
    elif labels.ndim == 2:
        several = _zeros_and_ones(labels, where)
        is_used = (several == 1).any(axis=1) if split is None else split != NO_SPLIT
        if multi_label or not _is_one_class_a_node(several, is_used):
            names = _check_names(class_names, several.shape[1], where, names_all=True)
            return Labels(several, names)
        class_names = _check_names(class_names, several.shape[1], where, names_all=True)
        labels = np.where((several == 1).any(axis=1), several.argmax(axis=1), NO_CLASS)
        if trains:
            notes = (
                f"the zeros and ones in {where} give each node one class, and are read so; if a "
                "node may have several, add --multi-label",
            )
    elif labels.dtype.kind in "SU":
        labels, class_names = _numbers_of(labels, class_names, where)
    numbers = _class_numbers(labels, where, len(labels) if trains else MOST_CLASSES)
    names = _check_names(class_names, int(numbers.max()) + 1, where, counts_from_0=0 in numbers)
    return Labels(numbers, names, notes)


def check_trainable(
    labels: np.ndarray, split: np.ndarray, class_names: Sequence[str], where: str
) -> None:
    """Raise InputError, which begins with `where`, if there is nothing to train or to test with.

    There must be training and test nodes, and where a node has one class, training nodes of each.
    """
    for part, text in ((TRAIN, "training"), (TEST, "test")):
        if not (split == part).any():
            raise InputError(
                f"{where}: has no {text} nodes (with a class); mark some with {part} in its split"
            )
    if labels.ndim == 1:
        trained = np.bincount(labels[split == TRAIN], minlength=len(class_names))
        if not trained.all():
            absent = int(trained.argmin())
            name = escaped(class_names[absent])
            advice = "put some of its nodes into the training split, or leave the class out"
            if absent == 0 and not (labels == 0).any():
                advice = "classes count from 0, so subtract 1 if these labels count from 1"
            raise InputError(f"{where}: class {absent} ('{name}') has no training nodes; {advice}")


def whole_numbers(array: np.ndarray) -> np.ndarray | None:
    """Return an array as whole numbers, of an integer type; None if some are not whole."""
    if array.dtype.kind in "iu":
        return array
    if array.dtype.kind != "f" or not (np.abs(array) <= _MOST_EXACT).all():  # NaN fails too
        return None
    return array.astype(np.int64) if (array == np.floor(array)).all() else None


def _is_one_class_a_node(several: np.ndarray, is_used: np.ndarray) -> bool:
    counts = several.sum(axis=1)
    if (several == UNKNOWN).any():
        return False
    return bool(is_used.any() and (counts[is_used] == 1).all() and (counts <= 1).all())


def _numbers_of(
    labels: np.ndarray, class_names: Sequence[str] | None, where: str
) -> tuple[np.ndarray, Sequence[str]]:
    """Replace the names of classes by their numbers."""
    try:
        texts = np.strings.decode(labels, "utf-8") if labels.dtype.kind == "S" else labels
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: its labels are bytes that are no UTF-8 ({error}); save np.array(y, "
            "dtype=str)"
        ) from error
    found, positions = np.unique(texts, return_inverse=True)
    names = found.tolist() if class_names is None else list(class_names)
    numbers = {name: number for number, name in reversed([*enumerate(names)])}
    if unknown := [name for name in found.tolist() if name not in numbers]:
        raise InputError(
            f"{where}: has nodes of the class '{escaped(unknown[0])}', which is none of the "
            f"{len(names)} in its classes; name it there"
        )
    return np.array([numbers[name] for name in found.tolist()])[positions], names


def _class_numbers(labels: np.ndarray, where: str, most: int) -> np.ndarray:
    is_shaped = labels.ndim == 1
    labels = labels.view(np.int8) if labels.dtype.kind == "b" else labels
    numbers = whole_numbers(labels) if is_shaped else None
    if numbers is None:
        what = f"are {labels.dtype} of shape {labels.shape}"
        if is_shaped and labels.dtype.kind == "f":
            node = int((~(np.abs(labels) <= _MOST_EXACT) | (labels != np.floor(labels))).argmax())
            what = f"are {labels.dtype}, and that of node {node} is {labels[node]}"
        raise InputError(
            f"{where}: its labels {what}, expected the number of each node's class, from 0, or "
            f"{NO_CLASS} for none, of shape (n,), the classes' names, or zeros and ones of shape "
            "(n, C) where a node may have several classes; save them so"
        )
    # To train, every class needs a node, so there are no more classes than nodes.
    wrong = (numbers < NO_CLASS) | (numbers >= most)
    if wrong.any():
        node = int(wrong.argmax())
        raise InputError(
            f"{where}: node {node} has the label {numbers[node]}, but classes count from 0, with "
            f"{NO_CLASS} for none; number the classes 0, 1, 2 and so on"
        )
    return numbers.astype(np.int64)


def _zeros_and_ones(labels: np.ndarray, where: str) -> np.ndarray:
    """Read labels, (n, C), as int8: 0, 1 and UNKNOWN."""
    if labels.shape[1] >= 1 and labels.dtype.kind in "biuf":
        is_unknown = np.isnan(labels) if labels.dtype.kind == "f" else np.zeros(1, np.bool_)
        if labels.dtype.kind in "if":
            is_unknown = is_unknown | (labels == UNKNOWN)
        if ((labels == 0) | (labels == 1) | is_unknown).all():
            return np.where(is_unknown, np.int8(UNKNOWN), labels == 1).astype(np.int8)
    raise InputError(
        f"{where}: its labels are {labels.dtype} of shape {labels.shape}, expected zeros and ones "
        "in this shape, and NaN or -1 for what is not known; where a node has one class, save its "
        "number in the shape (n,)"
    )


def _check_names(
    names: Sequence[str] | None,
    num_classes: int,
    where: str,
    *,
    names_all: bool = False,
    counts_from_0: bool = True,
) -> tuple[str, ...]:
    """Return the names of so many classes, by default their numbers; there may be more names."""
    if names is None:
        return tuple(str(label) for label in range(num_classes))
    if num_classes > len(names) or (names_all and num_classes < len(names)):
        advice = "name every class"
        if not counts_from_0:
            advice = "classes count from 0, so subtract 1 if these labels count from 1"
        raise InputError(
            f"{where}: its labels are of {num_classes} classes, but it names {len(names)}; {advice}"
        )
    check_class_names(names, where)
    return tuple(names)
