"""Predict the most likely classes of image files, with the same pipeline as evaluation."""

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vigpipe.data.formats.folders import images_below
from vigpipe.errors import InputError
from vigpipe.messages import one_line

NUM_SHOWN = 5  # classes per image


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, most likely first.

    Attributes:
        image: path of the image file.
        labels: labels of the classes, at most NUM_SHOWN.
        names: name of the class of each label.
        probabilities: probability of each label.
    """

    image: Path
    labels: tuple[int, ...]
    names: tuple[str, ...]
    probabilities: tuple[float, ...]

    def as_text(self) -> str:
        """Format as text: one line for the file, one for every class, and an empty one."""
        return as_lines(str(self.image), self.names, self.probabilities)

    def as_json(self) -> str:
        """Format as one line of JSON."""
        likely = top(self.names, self.labels, self.probabilities)
        return json.dumps({"image": str(self.image), "predicted": self.names[0], "top": likely})

    def as_row(self) -> list[object]:
        """Return the cells of a row of CSV, whose head is `head_of_rows("image", ...)`."""
        return [self.image, self.names[0], *cells(self.names, self.probabilities)]


def as_lines(title: str, names: Sequence[str], probabilities: Sequence[float]) -> str:
    """Format the most likely classes of something as text, with a line for each."""
    pairs = zip(probabilities, names, strict=True)
    lines = [f"{probability:8.2%}  {one_line(name)}" for probability, name in pairs]
    return "\n".join([one_line(title), *lines, ""])


def top(
    names: Sequence[str], labels: Sequence[int], probabilities: Sequence[float]
) -> list[dict[str, str | int | float]]:
    """Return the most likely classes of something, for JSON."""
    rows = zip(names, labels, probabilities, strict=True)
    return [{"class": name, "label": i, "probability": p} for name, i, p in rows]


def cells(names: Sequence[str], probabilities: Sequence[float]) -> list[object]:
    """Return the most likely classes of something, for CSV: each with its probability."""
    return [cell for pair in zip(names, probabilities, strict=True) for cell in pair]


def head_of_rows(*what: str, num_classes: int) -> list[str]:
    """Name the columns of CSV: what is predicted, its class, the likeliest ones."""
    places = range(1, min(NUM_SHOWN, num_classes) + 1)
    pairs = [name for i in places for name in (f"class{i}", f"probability{i}")]
    return [*what, "predicted", *pairs]


def as_csv(row: Sequence[object]) -> str:
    """Write a row of CSV without the end of its line."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(row)
    return text.getvalue()


def make_prediction(
    path: Path, names: Sequence[str], labels: Sequence[int], probabilities: Sequence[float]
) -> Prediction:
    """Make the prediction of an image from a row of `most_likely`; `names` are by label."""
    check_finite(str(path), probabilities)
    return Prediction(path, tuple(labels), tuple(names[i] for i in labels), tuple(probabilities))


def check_finite(what: str, probabilities: Sequence[float]) -> None:
    """Raise FloatingPointError if the logits of something were NaN or infinite."""
    if not all(map(math.isfinite, probabilities)):
        raise FloatingPointError(
            f"{what}: the model's logits are NaN or infinite; check the weights, or choose a wider "
            "--dtype"
        )


def most_likely(logits: Tensor, *, several: bool = False) -> tuple[Tensor, Tensor]:
    """Return probabilities, (b, 5) float64, and labels of the likeliest classes; ties by label.

    With fewer than 5 classes there are as many columns. Rows with NaN or infinite logits are NaN.
    Where each may have `several` classes or none, their probabilities do not depend on one another.
    """
    logits = logits.double()
    logits = logits.masked_fill(~logits.isfinite().all(1, keepdim=True), torch.nan)
    probabilities = logits.sigmoid() if several else logits.softmax(1)
    values, labels = probabilities.sort(dim=1, descending=True, stable=True)
    return values[:, :NUM_SHOWN], labels[:, :NUM_SHOWN]


def list_files(given: Sequence[Path]) -> list[Path]:
    """List the given files, with folders replaced by the images in and below them."""
    if not given:
        raise InputError("predict: name image files or folders of them, such as photos/cat.png")
    paths: list[Path] = []
    for path in given:
        if os.path.isdir(path):  # Path.is_dir raises an error for a name of 300 letters
            images = images_below(path)
            if not images:
                raise InputError(f"{path}: holds no images; name image files or a folder of them")
            paths += images
        elif os.path.lexists(path):
            paths.append(path)
        else:
            raise InputError(f"{path}: no such file or folder; name images to predict")
    return paths
