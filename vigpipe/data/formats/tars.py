"""Tar files: WebDataset's shards, whose samples have labels, or tars of images in class folders.

Nothing is extracted: `data/tars` finds the images, which are read at their positions.
"""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

import numpy as np

from vigpipe.data.formats.labels import listed_names
from vigpipe.data.images import NUM_THREADS
from vigpipe.data.left_out import told
from vigpipe.data.stored import Stored, StoredImages
from vigpipe.data.tars.images import TarImages
from vigpipe.data.tars.index import Stamp, index_images
from vigpipe.data.tars.load import LoadFromTars, OpenTars
from vigpipe.data.tars.shards import Shards, find_shards, seem_there
from vigpipe.data.texts import join
from vigpipe.errors import InputError
from vigpipe.files.names import escaped, is_plain


@dataclass(frozen=True)
class _Tars:
    """The tar files of a split, with the images in each of them and its stamp."""

    paths: tuple[Path, ...]
    images: tuple[TarImages, ...]
    stamps: tuple[Stamp, ...]


def holds(path: Path) -> bool:
    """Whether a folder has tar files for its splits, and no folders of images; by names alone."""
    return seem_there(path)


def read(root: Path) -> Stored:
    """Find the images of all tars; the classes are those of the train images."""
    shards = find_shards(root)
    train, test = _index(shards["train"]), _index(shards["test"])
    of_samples = [path for path, images in _each(train, test) if images.num_samples]
    of_folders = [path for path, images in _each(train, test) if not images.num_samples]
    if of_samples and of_folders:
        raise InputError(
            f"{of_folders[0]}: no image has a label (.cls or .json) beside it, but in "
            f"{of_samples[0]} they have; all tars are of one kind"
        )
    return _from_samples(root, train, test) if of_samples else _from_folders(root, train, test)


def _index(shards: Shards) -> _Tars:
    """Find the images in the tars of a split, and compare their numbers with a list's."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        found = list(threads.map(index_images, shards.paths, [shards.field] * len(shards.paths)))
    tars = _Tars(shards.paths, *zip(*found, strict=True))
    counts = [images.num_samples or len(images) for images in tars.images]
    for path, listed, count in zip(tars.paths, shards.lengths or counts, counts, strict=True):
        if listed != count:
            raise InputError(
                f"{path}: has {count} samples, but the list gives {listed}; download it again or "
                "correct shard_lengths"
            )
    if not any(map(len, tars.images)):
        raise InputError(
            f"{tars.paths[0]}: no sample has a label '{escaped(shards.field or '')}' of 0 or more, "
            "here and in the other tars of the split; correct alt_label in the list"
        )
    # timm's lists may count samples without a label, or not.
    possible = {sum(counts), sum(map(len, tars.images))}
    if shards.num_samples is not None and shards.num_samples not in possible:
        raise InputError(
            f"{tars.paths[0].parent}: has {sum(counts)} samples from {tars.paths[0].name} on, but "
            f"the list gives {shards.num_samples}; download them again or correct num_samples"
        )
    return tars


def _each(*splits: _Tars) -> Iterator[tuple[Path, TarImages]]:
    for tars in splits:
        yield from zip(tars.paths, tars.images, strict=True)


def _load(tars: _Tars) -> LoadFromTars:
    return LoadFromTars(
        OpenTars(tars.paths, tars.stamps),
        np.repeat(np.arange(len(tars.images), dtype=np.int32), [len(i) for i in tars.images]),
        np.concatenate([images.offsets for images in tars.images]),
        np.concatenate([images.sizes for images in tars.images]),
        join([images.names for images in tars.images]),
    )


def _from_samples(root: Path, train: _Tars, test: _Tars) -> Stored:
    """Take the labels that the samples have."""
    names = listed_names(root)
    if names is None:
        largest = max(int(images.labels.max(initial=-1)) for images in train.images)
        names = tuple(map(str, range(largest + 1)))
    for path, images in _each(train, test):
        for index in np.flatnonzero(images.labels >= len(names)).tolist():
            raise InputError(
                f"{path}: {images.names[index]}: has the label {images.labels[index]}, but there "
                f"are {len(names)} classes, which have the labels 0 … {len(names) - 1}; correct it"
            )

    def stored(tars: _Tars) -> StoredImages:
        labels = np.concatenate([images.labels for images in tars.images])
        return StoredImages(labels, _load(tars))

    return Stored(names, stored(train), stored(test))


def _from_folders(root: Path, train: _Tars, test: _Tars) -> Stored:
    """Take the folders in the tars as classes, or the names of tars without folders."""
    train_classes, test_classes = _class_of_folders(root, train), _class_of_folders(root, test)
    names = sorted({name for names in train_classes for name in names})
    label_of = {name: label for label, name in enumerate(names)}
    for path, classes in zip(test.paths, test_classes, strict=True):
        for name in classes:
            if name not in label_of:
                raise InputError(
                    f"{path}: holds test images of class {name!r}, but the train images are of "
                    f"{escaped(', '.join(names))}; the test classes are among the train classes"
                )

    def stored(tars: _Tars, classes: list[list[str]]) -> StoredImages:
        labels = np.concatenate(
            [
                np.array([label_of[name] for name in of_tar], dtype=np.int64)[images.labels]
                for images, of_tar in zip(tars.images, classes, strict=True)
            ]
        )
        load = _load(tars)
        return StoredImages(labels, load).take(_by_name(labels, load))

    others = Counter(suffix for _, images in _each(train, test) for suffix in images.others)
    splits = stored(train, train_classes), stored(test, test_classes)
    return Stored(tuple(names), *splits, notes=told(others))


def _class_of_folders(root: Path, tars: _Tars) -> list[list[str]]:
    """Return the class of every folder of every tar, in the order of `TarImages.folders`."""
    # The name of the innermost tar, and the folders on the way in it.
    found = [
        [
            (inner or path.stem, *PurePosixPath(folder).parts)
            for inner, _, folder in (both.partition("/") for both in images.folders)
        ]
        for path, images in _each(tars)
    ]
    everywhere = [
        (path, parts) for path, of_tar in zip(tars.paths, found, strict=True) for parts in of_tar
    ]
    flat = [path for path, (tar, *folders) in everywhere if not folders]
    if len(flat) == len(everywhere):
        for path, (tar,) in everywhere:
            if path.parent == root and tar == path.stem:  # Other tars are classes themselves.
                raise InputError(
                    f"{path}: its images are in no class folders and have no labels (.cls or "
                    ".json) beside them; make a tar of <class>/<image>"
                )
            if not is_plain(tar):
                raise InputError(
                    f"{path.parent}: the tar {escaped(path.name)} of a class has control "
                    "characters in its name, or bytes that are not UTF-8; rename it"
                )
        return [[tar for (tar,) in of_tar] for of_tar in found]
    if flat:
        raise InputError(
            f"{flat[0]}: has images in no class folder, but other images of this split are in one; "
            "make the tars of <class>/<image>"
        )
    folders = ["/".join(parts) for _, (_, *parts) in everywhere]
    shared = PurePosixPath(os.path.commonpath(folders)).parts
    num_shared = min(len(shared), min(len(parts) for _, (_, *parts) in everywhere) - 1)
    for path, (_, *parts) in everywhere:
        if len(parts) > num_shared + 1:
            raise InputError(
                f"{path}: has images in {'/'.join(parts)}, where it is unclear which folder is the "
                f"class, as others are in {min(folders)}; make a tar of <class>/<image>"
            )
    return [[parts[-1] for parts in of_tar] for of_tar in found]


def _by_name(labels: np.ndarray, load: LoadFromTars) -> np.ndarray:
    """Order images by class and name, as files would be: (n,) int64; refuse equal names."""
    by_label = np.argsort(labels, kind="stable")
    ends = np.flatnonzero(np.diff(labels[by_label])) + 1
    order: list[int] = []
    for of_class in np.split(by_label, ends):
        named = sorted((load.names[index], index) for index in of_class.tolist())
        for (name, index), (next_name, next_index) in pairwise(named):
            if name == next_name:
                raise InputError(
                    f"{load.name_of(index)}: is in {load.name_of(next_index)} too, and which of "
                    "them is meant is unknown; remove one"
                )
        order += [index for _, index in named]
    return np.array(order, dtype=np.int64)
