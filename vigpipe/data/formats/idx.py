"""A folder with the four files of MNIST, in its idx format, plain or compressed with gzip.

MNIST's own page gave the format: http://yann.lecun.com/exdb/mnist. Fashion-MNIST and KMNIST use it.
"""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vigpipe.data.formats import arrays
from vigpipe.data.formats.labels import check_labels, listed_names
from vigpipe.data.per_process import PerProcess
from vigpipe.data.stored import Look, Stored, StoredImages
from vigpipe.errors import InputError
from vigpipe.files.untrusted import opened

_STEMS = ("train", "t10k")  # how the names of the train and of the test files begin
_UBYTE = 8  # type of the numbers, third byte of a file; the fourth is the number of dimensions
_IMAGES, _LABELS = ("images", 3), ("labels", 1)  # name and number of dimensions


def holds(path: Path) -> bool:
    """Whether a folder has one of the files, by its name."""
    return any(
        os.path.isfile(path / name)
        for stem in _STEMS
        for what in (_IMAGES, _LABELS)
        for name in _names(stem, *what)
    )


def read(root: Path) -> Stored:
    """Read the headers and the labels; compressed pixels are unpacked, which finds their damage."""
    train, test = (_read_split(root, stem) for stem in _STEMS)
    labels = check_labels(train.labels, test.labels, listed_names(root), str(root))
    # Mirroring is left out because most data sets of this format are characters.
    return Stored(labels.names, train, test, Look(channels=1, flip=False, is_encoded=False))


def _read_split(root: Path, stem: str) -> StoredImages:
    images_path, labels_path = (_find(root, _names(stem, *what)) for what in (_IMAGES, _LABELS))
    with _opened(images_path) as file:
        shape = _read_shape(file, images_path, _IMAGES[1])
        _check_size(file, images_path, shape)
    arrays.check_sides(shape, str(images_path))
    with _opened(labels_path) as file:
        (num_labels,) = _read_shape(file, labels_path, _LABELS[1])
        if num_labels != shape[0]:
            raise InputError(
                f"{labels_path}: has {num_labels} labels, but {images_path.name} has {shape[0]} "
                "images; take both files from the same data set"
            )
        _check_size(file, labels_path, (num_labels,))
        labels = arrays.unpack_pixels(file, (num_labels,))
    pixels = PerProcess(partial(_open_pixels, images_path, shape))
    pixels()
    return StoredImages(labels.astype(np.int64), arrays.ArrayImages(pixels, str(images_path)))


def _open_pixels(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Map the pixels of a plain file, or unpack those of a compressed one: (n, h, w) uint8."""
    with _opened(path) as file:
        if _read_shape(file, path, len(shape)) != shape:
            raise InputError(f"{path}: has changed while it was in use; start again")
        if _is_packed(path):
            return arrays.unpack_pixels(file, shape)
        return arrays.map_pixels(path, file.tell(), shape)


def _is_packed(path: Path) -> bool:
    return path.suffix == ".gz"


def _names(stem: str, what: str, num_dimensions: int) -> list[str]:
    plain = [f"{stem}-{what}{mark}idx{num_dimensions}-ubyte" for mark in "-."]
    return [*plain, *(f"{name}.gz" for name in plain)]


def _find(root: Path, names: list[str]) -> Path:
    for name in names:
        if os.path.isfile(root / name):
            return root / name
    raise InputError(
        f"{root}: has no file {names[0]} or {names[0]}.gz; MNIST's four files are expected, images "
        "and labels of train and t10k"
    )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, which decompresses itself if it is compressed; damage is an InputError."""
    with opened(path) as plain:
        try:
            with gzip.GzipFile(fileobj=plain) if _is_packed(path) else plain as file:
                yield file  # pyrefly: ignore[invalid-yield]
        except InputError:
            raise
        except (EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(
                f"{path}: is damaged or not wholly downloaded ({error}); fetch it again"
            ) from error


def _read_shape(file: BinaryIO, path: Path, num_dimensions: int) -> tuple[int, ...]:
    size = 4 + 4 * num_dimensions
    head = file.read(size)
    if len(head) < size:
        raise EOFError(f"it ends within its header of {size} bytes")
    magic = head[:4].hex()
    expected = bytes([0, 0, _UBYTE, num_dimensions]).hex()
    if magic != expected:
        raise InputError(
            f"{path}: begins with the bytes {magic}, expected {expected}, the mark of an idx file "
            f"of {num_dimensions} dimension(s) of bytes; this is another kind of file"
        )
    return struct.unpack(f">{num_dimensions}I", head[4:])


def _check_size(file: BinaryIO, path: Path, shape: tuple[int, ...]) -> None:
    """Compare a plain file with its header; of a compressed one, limit what will be unpacked."""
    declared = math.prod(shape)
    if _is_packed(path):
        if declared > arrays.MOST_UNPACKED:
            raise InputError(
                f"{path}: says that it holds {declared} bytes, at most {arrays.MOST_UNPACKED} are "
                "unpacked into memory; decompress it with gunzip, and it will be mapped instead"
            )
        return
    rest = os.fstat(file.fileno()).st_size - file.tell()
    if rest != declared:
        shown = "×".join(map(str, shape))
        raise InputError(
            f"{path}: has {rest} bytes behind its header, expected {declared} ({shown}); it is "
            "damaged or not wholly downloaded: fetch it again"
        )
