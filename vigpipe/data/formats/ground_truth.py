"""The classes of images that lie in one folder, from a list beside it, as ImageNet has them.

The first of these lists counts that is there:

LOC_val_solution.csv                    Kaggle's: a head, then ILSVRC2012_val_00000001,n01751748 ...
val.txt                                 Caffe's: ILSVRC2012_val_00000001.JPEG 65, or a class's name
ILSVRC2012_validation_ground_truth.txt  the devkit's, with its meta.mat beside it: a number a line

The numbers of val.txt count the classes, sorted by name, from 0; those of the devkit are its own.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import read_bytes, read_text

_MOST_BYTES, _MOST_MAT = 1 << 26, 1 << 20  # zlib makes at most 1,030 times as much of these
_DEVKIT = "ILSVRC2012_devkit_t12/data"
_LISTS = ("LOC_val_solution.csv", "val.txt", "ILSVRC2012_validation_ground_truth.txt")


def read(root: Path, folder: Path, classes: Sequence[str]) -> dict[str, list[Path]]:
    """List a folder's images by class, sorted by name; `classes` are those of the train images.

    Raises:
        InputError: there is no list, or it has not exactly these images.
    """
    places = [root / name for name in (*_LISTS, f"{_DEVKIT}/{_LISTS[-1]}")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise InputError(
            f"{folder}: has images and no class folders; put them into folders of their classes, "
            f"or one of {', '.join(_LISTS)} into {root}"
        )
    images = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    lines = [line for line in read_text(path, _MOST_BYTES).splitlines() if line.strip()]
    if path.name == _LISTS[2]:
        if len(lines) != len(images):
            raise InputError(
                f"{path}: has {len(lines)} lines, and {folder} {len(images)} images; give the list "
                "of these images"
            )
        names = _synsets(path.with_name("meta.mat"))
        found = zip(images, (_of_number(line, names, path, 1) for line in lines), strict=True)
    else:
        parse = _of_kaggle if path.name == _LISTS[0] else _of_caffe
        class_of = dict(parse(lines, classes, path))
        missing = [image for image in images if image.name not in class_of]
        if missing:
            raise InputError(f"{missing[0]}: has no class in {path}; add it, or remove the image")
        found = ((image, class_of[image.name]) for image in images)
    by_class: dict[str, list[Path]] = {}
    for image, name in found:
        by_class.setdefault(name, []).append(image)
    return dict(sorted(by_class.items()))


def _of_kaggle(lines: list[str], _: Sequence[str], path: Path) -> Iterator[tuple[str, str]]:
    for line in lines[1:]:
        image, comma, boxes = line.partition(",")
        if not comma or not boxes.split():
            raise _wrong(path, line, "ILSVRC2012_val_00000001,n01751748 ...")
        yield f"{image}.JPEG", boxes.split()[0]


def _of_caffe(lines: list[str], classes: Sequence[str], path: Path) -> Iterator[tuple[str, str]]:
    known = {*classes}
    for line in lines:
        image, _, name = line.strip().rpartition(" ")
        if not image:
            raise _wrong(path, line, "ILSVRC2012_val_00000001.JPEG 65")
        is_name = name in known or not name.isdecimal()
        yield Path(image.strip()).name, name if is_name else _of_number(name, classes, path, 0)


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

    content = io.BytesIO(read_bytes(path, _MOST_MAT))
    try:
        synsets = loadmat(content, squeeze_me=True, variable_names=["synsets"])["synsets"]
        rows = [(int(row[0]), str(row[1])) for row in synsets if int(row[4]) == 0]
    except Exception as error:  # SciPy raises whatever a damaged file leads to
        raise InputError(
            f"{path}: is not the devkit's meta.mat ({error}); take it from ILSVRC2012_devkit_t12"
        ) from error
    return [name for _, name in sorted(rows)]


def _wrong(path: Path, line: str, expected: str) -> InputError:
    return InputError(f"{path}: has the line '{escaped(line, 60)}', expected {expected}; mend it")
