"""The images in a tar: samples with labels, as WebDataset writes them, or images in class folders.

A sample is a run of members whose paths are equal up to the first dot of the last part:

    a/10026.jpg     an image
    a/10026.cls     its label, a decimal number; or
    a/10026.json    {"label": 0, ...}

A tar in which no image has a label beside it holds class folders; or it is itself the folder of one
class; or it holds tars of either kind, one level deep.
"""

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePosixPath

import numpy as np

from vigpipe.data.images import EXTENSIONS, is_image
from vigpipe.data.left_out import suffix_of
from vigpipe.data.tars.headers import Members, find_members
from vigpipe.data.texts import Texts, pack
from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import no_duplicates

MOST_CLASSES = 1 << 20  # Samples have as many classes as their largest label says.
_MOST_LABEL_BYTES = {"cls": 64, "json": 1 << 20}
_LONGEST_INNER = 255  # bytes of an inner tar's path, which the name of each of its images repeats


@dataclass(frozen=True)
class TarImages(Members):
    """The images in a tar file, with names such as "inner.tar: path" for one in an inner tar."""

    labels: np.ndarray  # (n,) int64: the label of a sample, or an index into `folders`
    # "inner/folder" of every class folder: the name of an inner tar without .tar, and a folder in
    # it; the first is empty for images in no inner tar, the second for those in no folder. There
    # are none if the tar holds samples.
    folders: Texts
    # Those that were left out for having no label among them; 0 if the tar holds class folders.
    num_samples: int = 0
    # The suffixes of files in class folders that are no images, one for each.
    others: Texts = field(default_factory=lambda: pack(()))


def find_images(descriptor: int, num_bytes: int, where: str, field: str | None) -> TarImages:
    """Find the images in an open tar file of `num_bytes`, and their labels or class folders.

    The field is the key of the label in the JSON of every sample, whose negative labels leave
    samples out; without one, labels are the numbers in .cls, or have the key "label".
    """
    members = find_members(descriptor, 0, num_bytes, where)
    samples = _samples(descriptor, members, where, field)
    return _class_folders(descriptor, members, where) if samples is None else samples


def _samples(descriptor: int, members: Members, where: str, field: str | None) -> TarImages | None:
    """Read the labels of all samples; None if no image has a label beside it."""
    images, labels = array("q"), array("q")
    num_samples, has_cls = 0, False
    wrong: InputError | None = None  # the first error, if these are samples
    for key, parts in _by_key(members):
        label_kind = "json" if field or all(kind != "cls" for kind, _ in parts) else "cls"
        with_image = [index for kind, index in parts if f".{kind}" in EXTENSIONS]
        with_label = [index for kind, index in parts if kind == label_kind]
        has_cls = has_cls or any(kind.endswith("cls") for kind, _ in parts)
        if not with_image and not with_label:
            continue
        if len(with_image) != 1 or len(with_label) != 1:
            kinds = escaped(" and ".join(f".{kind}" for kind, _ in parts))
            wrong = wrong or InputError(
                f"{where}: {key}: has {kinds}, but a sample is one image and one label (.json"
                f"{'' if field else ' or .cls'}); complete or remove it"
            )
            continue
        label = _label(descriptor, members, with_label[0], label_kind, field)
        if label is None and "/" in key and label_kind == "json" and not (field or num_samples):
            return None  # The JSON is about something else, and the folders are the classes.
        num_samples += 1
        if label is not None and label >= 0:
            images.append(with_image[0])
            labels.append(label)
        elif label is None or not field:
            name = f"{where}: {members.names[with_label[0]]}"
            wrong = wrong or _no_label(name, label_kind, field)
    if not num_samples and not has_cls:
        return None
    if not num_samples:
        raise InputError(
            f"{where}: has labels (.cls) but no image beside one; the paths of an image and its "
            "label are equal up to the first dot of the last part, so rename them"
        )
    if wrong:
        raise wrong
    chosen = np.array(images, dtype=np.int64)
    return TarImages(
        pack(members.names[index] for index in images),
        members.offsets[chosen],
        members.sizes[chosen],
        np.array(labels, dtype=np.int64),
        pack(()),
        num_samples,
    )


def _by_key(members: Members) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield a sample's key, and of each member what follows the key and a dot, and the index."""

    def split(path: str) -> tuple[str, str]:
        folder, slash, name = path.rpartition("/")
        stem, _, kind = name.partition(".")
        return folder + slash + stem, kind.lower()

    parts = enumerate(map(split, members.names))
    for key, group in groupby(parts, key=lambda part: part[1][0]):
        yield key, [(kind, index) for index, (_, kind) in group]


def _label(
    descriptor: int, members: Members, index: int, kind: str, field: str | None
) -> int | None:
    """Read the label in a member; None if it holds none that can be meant."""
    if members.sizes[index] > _MOST_LABEL_BYTES[kind]:
        return None
    content = os.pread(descriptor, int(members.sizes[index]), int(members.offsets[index]))
    if kind == "cls":
        digits = content.strip()
        label = int(digits) if digits.isdigit() else None
    else:
        try:
            facts = json.loads(content, object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError):
            facts = None
        label = facts.get(field or "label") if isinstance(facts, dict) else None
    is_label = isinstance(label, int) and not isinstance(label, bool) and label < MOST_CLASSES
    return label if is_label else None


def _no_label(name: str, kind: str, field: str | None) -> InputError:
    where = "" if kind == "cls" else f" as '{escaped(field or 'label')}'"
    return InputError(
        f"{name}: has no label, expected a whole number in 0 … {MOST_CLASSES - 1}{where} in at "
        f"most {_MOST_LABEL_BYTES[kind]} bytes; correct or remove the sample"
    )


def _class_folders(descriptor: int, members: Members, where: str) -> TarImages:
    """List the images of a tar, and of the tars in it, with the folders they are in."""
    offsets, sizes, labels = array("q"), array("q"), array("q")
    label_of_folder: dict[str, int] = {}
    others: list[str] = []

    def listed() -> Iterator[str]:
        for tar, before, inside in _with_inner_tars(descriptor, members, where):
            for name, offset, size in zip(inside.names, inside.offsets, inside.sizes, strict=True):
                if is_image(name):
                    folder = f"{tar}/{name.rpartition('/')[0]}"
                    labels.append(label_of_folder.setdefault(folder, len(label_of_folder)))
                    offsets.append(int(offset))
                    sizes.append(int(size))
                    yield before + name
                elif not _is_tar(name):
                    others.append(suffix_of(name))

    names = pack(listed())
    numbers = (np.array(offsets), np.array(sizes), np.array(labels))
    return TarImages(names, *numbers, pack(label_of_folder), others=pack(others))


def _with_inner_tars(
    descriptor: int, members: Members, where: str
) -> Iterator[tuple[str, str, Members]]:
    """Yield a tar and the tars in it: name, how the names of its images begin, members."""
    inner = [(index, name) for index, name in enumerate(members.names) if _is_tar(name)]
    if not inner:
        _check_images(members, where)
    folders = sorted({name.rpartition("/")[0] for _, name in inner})
    if len(folders) > 1:  # They might be train/ and val/.
        raise InputError(
            f"{where}: has tars in {folders[0] or 'its root'} and in {folders[1]}, expected them "
            "in one folder; unpack it"
        )
    yield "", "", members  # without a name: the file may be renamed before a cache is read
    for index, name in inner:
        if len(name.encode()) > _LONGEST_INNER:
            raise InputError(
                f"{where}: {name}: is a tar with a name of more than {_LONGEST_INNER} bytes; "
                "shorten it"
            )
        start, size = int(members.offsets[index]), int(members.sizes[index])
        inside = find_members(descriptor, start, start + size, f"{where}: {name}")
        for nested in filter(_is_tar, inside.names):
            raise InputError(
                f"{where}: {name}: {nested}: is a tar in a tar in a tar, but images lie at most "
                "one tar deeper; unpack the outer ones"
            )
        _check_images(inside, f"{where}: {name}")
        yield PurePosixPath(name).stem, f"{name}: ", inside


def _check_images(members: Members, where: str) -> None:
    if not any(map(is_image, members.names)):
        raise InputError(
            f"{where}: holds no images ({', '.join(EXTENSIONS)}); add some or remove it"
        )


def _is_tar(name: str) -> bool:
    return name.lower().endswith(".tar")
