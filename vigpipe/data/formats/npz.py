"""One .npz file of NumPy with Keras' or MedMNIST's names of arrays.

Pixels that are not compressed (np.savez) are mapped where they lie in the file, and their checksum
is not compared, which would read them all. NumPy's own reader would copy them into memory.
"""

import math
import zipfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vigpipe.data.formats.arrays import (
    MOST_UNPACKED,
    ArrayImages,
    check_sides,
    map_pixels,
    unpack_pixels,
)
from vigpipe.data.formats.labels import check_labels
from vigpipe.data.left_out import not_read
from vigpipe.data.per_process import PerProcess
from vigpipe.data.stored import Look, Stored, StoredImages
from vigpipe.errors import InputError
from vigpipe.files import npy
from vigpipe.files.names import escaped

# Train images, train labels, test images, test labels.
_NAMINGS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_CLASS_NAMES = "class_names"
_MOST_NAMES_BYTES = 16 << 20
_UNPACK = (
    "save it without compression, np.savez('new.npz', **np.load('old.npz')), and it will be mapped"
)


def holds(path: Path) -> bool:
    """Whether the name is that of a .npz file."""
    return path.suffix.lower() == ".npz"


def read(path: Path) -> Stored:
    """Read the headers and the labels; compressed pixels are unpacked, which finds their damage.

    Grey images are not mirrored in training, because they may be characters, and because in scans
    of organs left and right may be two classes. Without an array `class_names` the classes are
    called by their numbers. Other arrays, such as MedMNIST's `val_images`, are left alone.
    """
    with npy.opened_archive(path) as archive:
        members = npy.members_of(archive, path)
        naming = _naming(set(members), path)
        arrays = [_look_at(archive, members[name], path) for name in naming]
        packed = sum(array.num_bytes for array in arrays if array.is_packed)
        if packed > MOST_UNPACKED:
            raise InputError(
                f"{path}: its compressed arrays have {packed} bytes, at most {MOST_UNPACKED} are "
                f"unpacked into memory; {_UNPACK}"
            )
        for labels in arrays[1::2]:
            if labels.num_bytes > MOST_UNPACKED:
                raise InputError(
                    f"{labels} has {labels.num_bytes} bytes, expected at most {MOST_UNPACKED}, "
                    "since labels are read into memory; store the numbers of the classes"
                )
        channels = {_check_images(images) for images in arrays[::2]}
        train_labels = _read_labels(archive, arrays[0], arrays[1])
        test_labels = _read_labels(archive, arrays[2], arrays[3])
        names = None
        if _CLASS_NAMES in members:
            names = _read_names(archive, _look_at(archive, members[_CLASS_NAMES], path))
    if len(channels) > 1:
        raise InputError(
            f"{path}: of {naming[0]} and {naming[2]}, one is grey and one has colours; store both "
            "with the same channels"
        )
    labels = check_labels(train_labels, test_labels, names, str(path))
    train = StoredImages(labels.train, _images(arrays[0]))
    test = StoredImages(labels.test, _images(arrays[2]))
    is_grey = channels == {1}
    look = Look(channels=1 if is_grey else 3, flip=not is_grey, is_encoded=False)
    notes = not_read(str(path), [name for name in members if name not in (*naming, _CLASS_NAMES)])
    return Stored(labels.names, train, test, look, notes)


@dataclass(frozen=True)
class _Array:
    """What the header of an array says."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    # Position of its first number: in the file or, if it is compressed, in its own .npy file.
    offset: int
    is_packed: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


def _images(array: _Array) -> ArrayImages:
    """Make the loader of an array of images, and open it, which unpacks compressed pixels."""
    if array.is_packed:
        pixels = PerProcess(partial(_unpack, array))
    else:
        pixels = PerProcess(partial(map_pixels, array.path, array.offset, array.shape))
    pixels()
    return ArrayImages(pixels, str(array))


def _unpack(array: _Array) -> np.ndarray:
    with npy.opened_archive(array.path) as archive, archive.open(f"{array.name}.npy") as stream:
        stream.read(array.offset)
        return unpack_pixels(stream, array.shape)


def _naming(names: set[str], path: Path) -> tuple[str, ...]:
    complete = [naming for naming in _NAMINGS if names.issuperset(naming)]
    if len(complete) == 1:
        return complete[0]
    wanted = " or ".join(", ".join(naming) for naming in _NAMINGS)
    if complete:
        raise InputError(f"{path}: has both {wanted}; keep one of the two")
    found = escaped(", ".join(sorted(names)) or "none")
    raise InputError(
        f"{path}: has the arrays {found}, expected {wanted}; save it again with these names"
    )


def _look_at(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> _Array:
    """Read the header of an array, and compare it with the zip file's list."""
    npy.check_compression(info)
    with archive.open(info) as stream:
        shape, is_fortran, dtype, offset = npy.read_header(stream.read(npy.MOST_HEADER_BYTES))
    name = info.filename.removesuffix(".npy")
    if dtype.hasobject:
        raise InputError(
            f"{path}: {name} holds Python objects, which are pickled; save it again as an array of "
            f"numbers or, for names, as np.array({name}, dtype=str)"
        )
    if is_fortran:
        raise InputError(
            f"{path}: {name} is stored column by column (Fortran order); save it again as "
            f"np.ascontiguousarray({name})"
        )
    array = _Array(path, name, shape, dtype, offset, info.compress_type != zipfile.ZIP_STORED)
    if min(shape, default=0) < 0 or info.file_size != offset + array.num_bytes:
        raise ValueError(
            f"{info.filename} has {info.file_size} bytes, but its header says {shape} of {dtype}"
        )
    if array.is_packed:
        return array
    start = npy.start_of(info, path)
    if info.compress_size != info.file_size or start + info.file_size > path.stat().st_size:
        raise ValueError(f"{info.filename} is not wholly there")
    return replace(array, offset=start + offset)


def _check_images(array: _Array) -> int:
    """Check the type and the shape of an array of images, and return its number of channels."""
    if array.dtype != np.uint8:
        raise InputError(
            f"{array} has numbers of type {array.dtype}, expected uint8 of 0 … 255; store values "
            f"of 0 … 1 as ({array.name} * 255).round().astype('uint8')"
        )
    shape, channels = array.shape, array.shape[3:] or (1,)
    if len(shape) not in (3, 4) or channels[0] not in (1, 3):
        advice = "reshape it"
        if len(shape) == 4 and shape[1] in (1, 3):
            advice = f"put the channels last: {array.name}.transpose(0, 2, 3, 1).copy()"
        raise InputError(
            f"{array} has the shape {shape}, expected (n, h, w), (n, h, w, 1) or (n, h, w, 3); "
            f"{advice}"
        )
    check_sides(shape, str(array))
    return channels[0]


def _read_labels(archive: zipfile.ZipFile, images: _Array, labels: _Array) -> np.ndarray:
    num_images = images.shape[0]
    is_one_each = labels.shape in ((num_images,), (num_images, 1))
    if labels.dtype.kind not in "iuUS" or not is_one_each:
        advice = f"of rows with a 1 for the class take {labels.name}.argmax(1)"
        if is_one_each:
            advice = f"store {labels.name}.astype(int) if they are whole"
        raise InputError(
            f"{labels} has {labels.dtype} of shape {labels.shape}, expected whole numbers or texts "
            f"of shape ({num_images},), one for each image of {images.name}; {advice}"
        )
    found = _read_numbers(archive, labels).reshape(-1)
    if found.dtype.kind in "iu":
        return found.astype(np.int64)
    texts = found.tolist()  # This refuses what are no characters of Unicode.
    if found.dtype.kind == "S":  # What is not UTF-8 is refused as the name of a class.
        texts = [text.decode("utf-8", "surrogateescape") for text in texts]
    return np.array(texts, dtype=np.str_)


def _read_names(archive: zipfile.ZipFile, names: _Array) -> list[str]:
    if names.dtype.kind != "U" or len(names.shape) != 1 or names.num_bytes > _MOST_NAMES_BYTES:
        raise InputError(
            f"{names} has {names.dtype} of shape {names.shape}, expected one text for each class; "
            f"save np.array({names.name}, dtype=str)"
        )
    return _read_numbers(archive, names).tolist()


def _read_numbers(archive: zipfile.ZipFile, array: _Array) -> np.ndarray:
    """Read an array into memory, piece by piece; zipfile compares its checksum."""
    info = archive.getinfo(f"{array.name}.npy")
    content = memoryview(bytearray(info.file_size))
    with archive.open(info) as stream:
        if missing := npy.fill(content, stream):
            raise EOFError(f"{missing} bytes of {array.name} are missing")
    start = len(content) - array.num_bytes
    return np.frombuffer(content[start:], array.dtype).reshape(array.shape)
