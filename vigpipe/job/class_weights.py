"""The weight of each class in the loss of training (--class-weights)."""

import csv
import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.files.names import escaped, first_few
from vigpipe.files.untrusted import read_text

_MOST_BYTES = 1 << 24


def class_weights(option: str, class_names: Sequence[str], counts: np.ndarray) -> Tensor:
    """Return the weights that an option names, (classes,) float64.

    They are scaled so that the mean over all training samples is 1, of which the classes have so
    many: the loss is of the size that it has without weights.

    Args:
        option: balanced, where each class weighs the same, or a .csv file of classes and weights.
        class_names: by label.
        counts: training samples of each class, (classes,).

    Raises:
        InputError: the file is not as expected, or no training sample has a weight.
    """
    if option == "balanced":
        weights = 1 / np.maximum(counts, 1)
    else:
        weights = _read(Path(option), class_names)
    total = float(weights @ counts)
    if total == 0:
        raise InputError(f"{option}: gives every class of the training 0; give some a weight")
    return torch.from_numpy(weights * (counts.sum() / total))


def positive_weights(
    option: str, class_names: Sequence[str], having: np.ndarray, lacking: np.ndarray
) -> Tensor:
    """Return the weights of the samples that have a class, where they may have several.

    (classes,) float64, the `pos_weight` of torch's binary cross-entropy. `having` and `lacking`
    count the training samples that have a class, and those that have not; with `balanced`, both
    weigh the same together.
    """
    if option != "balanced":
        return torch.from_numpy(_read(Path(option), class_names))
    balanced = (having > 0) & (lacking > 0)
    return torch.from_numpy(np.where(balanced, lacking / np.maximum(having, 1), 1.0))


def digest_of_weights(weights: Tensor | None) -> dict[str, str]:
    """Return what a fingerprint says of weights of classes, if there are any."""
    if weights is None:
        return {}
    return {"SHA-256 of the class weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest()}


def _read(path: Path, class_names: Sequence[str]) -> np.ndarray:
    rows = [row for row in csv.reader(io.StringIO(read_text(path, _MOST_BYTES))) if row]
    label_of = {name: label for label, name in enumerate(class_names)}
    weights = np.full(len(class_names), math.nan)
    if rows and rows[0] == ["class", "weight"]:
        del rows[0]
    for row in rows:
        value = _number(row[1]) if len(row) == 2 else math.nan
        if not 0 <= value <= 1e6:  # NaN fails too
            raise InputError(
                f"{path}: has the row '{escaped(','.join(row), 60)}', expected a class and a "
                "weight from 0 to 1e6; mend it"
            )
        if row[0] not in label_of or not math.isnan(weights[label_of[row[0]]]):
            what = "is there twice" if row[0] in label_of else "is no class of the data"
            raise InputError(
                f"{path}: '{escaped(row[0], 60)}' {what}; the classes are {first_few(class_names)}"
            )
        weights[label_of[row[0]]] = value
    missing = [class_names[label] for label in np.flatnonzero(np.isnan(weights)).tolist()]
    if missing:
        raise InputError(f"{path}: has no weight of {first_few(missing)}; add a row for each")
    return weights


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
