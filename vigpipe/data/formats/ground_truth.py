"""The classes of images that lie in one folder, from a list beside it, as ImageNet has them.

Of a folder val/, the first of these lists counts that is there; of test/ it is test.txt:

LOC_val_solution.csv                    Kaggle's: a head, then ILSVRC2012_val_00000001,n01751748 ...
val.txt                                 Caffe's: ILSVRC2012_val_00000001.JPEG 65, or a class's name
ILSVRC2012_validation_ground_truth.txt  the devkit's, with its meta.mat beside it: a number a line

The numbers of val.txt count the classes, sorted by name, from 0; those of the devkit are its own.
"""

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from vigpipe.data.images import is_image
from vigpipe.errors import InputError
from vigpipe.files.names import check_class_names, escaped
from vigpipe.files.untrusted import read_bytes, read_text

_MOST_BYTES, _MOST_MAT = 1 << 26, 1 << 24  # of a list, and of the devkit's table once unpacked
_MAT_HEADER, _MAT_COMPRESSED = 128, 15
_DEVKIT = "ILSVRC2012_devkit_t12/data"
_KAGGLES, _DEVKITS = "LOC_val_solution.csv", "ILSVRC2012_validation_ground_truth.txt"


def read(root: Path, folder: Path, classes: Sequence[str]) -> dict[str, list[Path]]:
    """List a folder's images by class, sorted by name; `classes` are those of the train images.

    Raises:
        InputError: there is no list, or it has not exactly these images, each once.
    """
    names = [f"{folder.name}.txt"]
    if folder.name == "val":
        names = [_KAGGLES, *names, _DEVKITS]
    places = [root / name for name in (*names, f"{_DEVKIT}/{_DEVKITS}" * (folder.name == "val"))]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise InputError(
            f"{folder}: has images and no class folders; put them into folders of their classes, "
            f"or {', or '.join(names)} into {root}"
        )
    images = sorted(entry for entry in folder.iterdir() if is_image(entry.name))
    lines = [line for line in read_text(path, _MOST_BYTES).splitlines() if line.strip()]
    if path.name == _DEVKITS:
        if len(lines) != len(images):
            raise InputError(
                f"{path}: has {len(lines)} lines, and {folder} {len(images)} images; give the list "
                "of these images"
            )
        synsets = _synsets(path.with_name("meta.mat"))
        found = zip(images, (_of_number(line, synsets, path, 1) for line in lines), strict=True)
    else:
        parse = _of_kaggle if path.name == _KAGGLES else _of_caffe
        class_of: dict[str, str] = {}
        for image, name in parse(lines, classes, path):
            if image.parent.name not in ("", folder.name) or image.name in class_of:
                what = "is there twice" if image.name in class_of else f"is not of {folder.name}/"
                raise InputError(f"{path}: {escaped(str(image), 60)} {what}; leave it out")
            class_of[image.name] = name
        there = {image.name for image in images}
        for name in sorted(there ^ class_of.keys()):
            what = f"is not in {folder}" if name in class_of else "has no class"
            raise InputError(
                f"{path}: {escaped(name, 60)} {what}; give the list of these images, no more and "
                "no fewer"
            )
        found = ((image, class_of[image.name]) for image in images)
    by_class: dict[str, list[Path]] = {}
    for image, name in found:
        by_class.setdefault(name, []).append(image)
    check_class_names([*by_class], str(path))
    return dict(sorted(by_class.items()))


def _of_kaggle(lines: list[str], _: Sequence[str], path: Path) -> Iterator[tuple[Path, str]]:
    for line in lines[1:]:
        image, comma, boxes = line.partition(",")
        if not comma or not boxes.split():
            raise _wrong(path, line, "ILSVRC2012_val_00000001,n01751748 ...")
        yield Path(f"{image}.JPEG"), boxes.split()[0]


def _of_caffe(lines: list[str], classes: Sequence[str], path: Path) -> Iterator[tuple[Path, str]]:
    known = {*classes}
    for line in lines:
        image, _, name = line.strip().rpartition(" ")
        if not image:
            raise _wrong(path, line, "ILSVRC2012_val_00000001.JPEG 65")
        is_name = name in known or not name.isdecimal()
        yield Path(image.strip()), name if is_name else _of_number(name, classes, path, 0)


def _of_number(text: str, classes: Sequence[str], path: Path, first: int) -> str:
    number = text.strip()
    if number.isdecimal() and len(number) < 10 and first <= int(number) < len(classes) + first:
        return classes[int(number) - first]
    expected = f"a number from {first} to {len(classes) + first - 1}"
    if not classes:
        expected = "the name of a class, as there is no train/ whose classes a number could count"
    raise _wrong(path, text, expected)


def _synsets(path: Path) -> list[str]:
    """Return the classes by the devkit's numbers, from 1."""
    from scipy.io import loadmat

    content = read_bytes(path, _MOST_MAT)
    try:
        _check_size(content)
        table = loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])
        leaves = {int(row[0]): str(row[1]) for row in table["synsets"] if int(row[4]) == 0}
        if [*sorted(leaves)] != [*range(1, len(leaves) + 1)]:
            raise ValueError("its classes are not numbered from 1")
    except Exception as error:  # SciPy raises whatever a damaged file leads to
        raise InputError(
            f"{path}: is not the devkit's meta.mat ({error}); take it from ILSVRC2012_devkit_t12"
        ) from error
    return [leaves[number] for number in sorted(leaves)]


def _check_size(content: bytes) -> None:
    """Raise ValueError for a file of MATLAB 5 whose arrays would be larger than _MOST_MAT."""
    if content[_MAT_HEADER - 2 : _MAT_HEADER] != b"IM":
        raise ValueError("it is not a file of MATLAB 5 with the smallest byte first")
    place = _MAT_HEADER
    while place + 8 <= len(content):
        kind, size = struct.unpack_from("<II", content, place)
        if kind == _MAT_COMPRESSED:
            unpacking = zlib.decompressobj()
            unpacking.decompress(content[place + 8 : place + 8 + size], _MOST_MAT)
            if unpacking.unconsumed_tail:
                raise ValueError(f"an array has more than {_MOST_MAT} bytes")
        place += 8 + size


def _wrong(path: Path, line: str, expected: str) -> InputError:
    return InputError(f"{path}: has the line '{escaped(line, 60)}', expected {expected}; mend it")
