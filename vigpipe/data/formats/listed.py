"""A .csv or .tsv file that names image files, their classes and, if it says, their splits."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vigpipe.data.formats.folders import SPLIT_OF, Files
from vigpipe.data.stored import Stored, StoredImages
from vigpipe.data.texts import pack
from vigpipe.errors import InputError
from vigpipe.files.names import check_class_names, escaped
from vigpipe.files.untrusted import read_text

_MOST_BYTES = 1 << 28
_COLUMNS = {  # what the head may call each column
    "image": ("image", "file", "file_name", "filename", "path", "image_path"),
    "label": ("label", "class", "class_name", "category"),
    "split": ("split", "set", "subset"),
}


def holds(path: Path) -> bool:
    """Whether this is no folder, and has the name of a table."""
    return path.suffix.lower() in (".csv", ".tsv") and not os.path.isdir(path)


def read(path: Path) -> Stored:
    """Read the table; paths are relative to its folder, and without splits all is for training."""
    text = read_text(path, _MOST_BYTES).removeprefix("\ufeff")
    reader = csv.reader(io.StringIO(text), delimiter=_delimiter(text, path))
    paths: dict[str, None] = {}
    labels: list[str] = []
    splits: list[str] = []
    try:
        for image, label, split in _rows(reader, path):
            place = str(Path(path.parent, image))
            if place in paths:  # perhaps of training and test at once
                raise InputError(
                    f"{path}: line {reader.line_num}: {escaped(image, 60)} is there twice; name "
                    "each image once"
                )
            paths[place] = None
            labels.append(label)
            splits.append(split)
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}; mend it") from error
    if not paths:
        raise InputError(f"{path}: names no image; add a line for each")
    first = next(iter(paths))
    if not os.path.exists(first):
        raise InputError(
            f"{first}: is the first image of {path}, and is not there; paths are relative to "
            "the folder of the table"
        )
    names = sorted({*labels}, key=_in_order)
    check_class_names(names, str(path))
    label_of = {name: label for label, name in enumerate(names)}
    numbers = np.array([label_of[label] for label in labels], dtype=np.int64)
    images = StoredImages(numbers, Files(pack(paths), root=str(path.parent)))
    split_of = np.array(splits)
    parts = {name: images.take(np.flatnonzero(split_of == name)) for name in {*SPLIT_OF.values()}}
    validation = parts["validation"] if len(parts["validation"]) else None
    return Stored((*names,), parts["train"], parts["test"], validation=validation)


def _delimiter(text: str, path: Path) -> str:
    head = text.partition("\n")[0]
    if path.suffix.lower() == ".tsv":
        return "\t"
    return max(",;\t", key=head.count)


def _rows(reader: Iterator[list[str]], path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the image, the class and the split of each line."""
    head = [name.strip().lower() for name in next(reader, [])]
    places = {what: _place(head, what, path) for what in _COLUMNS}
    for row in reader:
        if not row:
            continue
        where = f"{path}: line {reader.line_num}"  # pyrefly: ignore[missing-attribute]
        if len(row) != len(head):
            raise InputError(
                f"{where}: has {len(row)} cells, and the head {len(head)}; put texts with commas "
                "in double quotes"
            )
        image, label, split = (
            row[place].strip() if place is not None else "train" for place in places.values()
        )
        if not image or not label:
            raise InputError(f"{where}: has no image or no class; fill in both, or remove the line")
        if split.lower() not in SPLIT_OF:
            raise InputError(
                f"{where}: is of the split '{escaped(split, 40)}', expected {', '.join(SPLIT_OF)}"
            )
        yield image, label, SPLIT_OF[split.lower()]


def _place(head: Sequence[str], what: str, path: Path) -> int | None:
    """Return which column has something; None if no column has the split."""
    found = [index for index, name in enumerate(head) if name in _COLUMNS[what]]
    if len(found) == 1 or (what == "split" and not found):
        return found[0] if found else None
    raise InputError(
        f"{path}: its first line is to name one column {' or '.join(_COLUMNS[what])}, and names "
        f"{len(found) or 'none'} of these; name the columns so"
    )


def _in_order(name: str) -> tuple[bool, int, str]:
    """Sort numbers as such, and before other texts."""
    is_number = name.isascii() and name.isdecimal() and len(name) < 10
    return not is_number, int(name) if is_number else 0, name
