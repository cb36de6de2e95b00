"""Labelled images as they are stored: what every format gives, before anything is done to them."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vigpipe.data.picture import Picture, size_of, turned_upright
from vigpipe.errors import InputError


class Load(Protocol):
    """Reads the images of a split one by one; threads call it at the same time.

    It is pickled for worker processes: what it opens, when it is called, is not in its pickle.
    """

    def __call__(self, index: int) -> Picture:
        """Return an image of whatever size; an InputError begins with `name_of(index)`."""
        ...

    def name_of(self, index: int) -> str:
        """Name the image at an index for messages: its path, or where in which file it is."""
        ...

    def marks(self) -> Iterable[bytes]:
        """Return what tells the images from others without reading them: their names and sizes.

        It does not depend on the folder that the data set is in.
        """
        ...


@dataclass(frozen=True)
class StoredImages:
    """The images of a split of a data set."""

    labels: np.ndarray  # (n,) int64
    load: Load

    def take(self, indices: np.ndarray) -> "StoredImages":
        return StoredImages(self.labels[indices], _Taken(self.load, indices))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class _Taken:
    load: Load
    indices: np.ndarray

    def __call__(self, index: int) -> Picture:
        return self.load(int(self.indices[index]))

    def name_of(self, index: int) -> str:
        return self.load.name_of(int(self.indices[index]))

    def marks(self) -> Iterable[bytes]:
        yield from self.load.marks()
        yield self.indices.tobytes()


@dataclass(frozen=True)
class Look:
    """What the pixels of a data set mean, and how they are stored."""

    channels: int = 3  # C, 1 for grey and 3 for colour
    white: int = 255  # the pixel value that stands for 1.0
    flip: bool = True  # whether a mirrored image still belongs to its class
    is_encoded: bool = True  # Loading an image takes a decoder: its pixels are worth keeping.


@dataclass(frozen=True)
class Stored:
    """A data set of labelled images in two or three splits, of which one may be empty."""

    class_names: tuple[str, ...]  # by label
    train: StoredImages
    test: StoredImages
    look: Look = Look()
    notes: tuple[str, ...] = ()  # sentences of what was left out
    validation: StoredImages | None = None  # if the data set has such images of its own

    @property
    def splits(self) -> dict[str, StoredImages]:
        both = {"train": self.train, "test": self.test}
        return both if self.validation is None else {**both, "validation": self.validation}

    def load(self, image: "ImageId") -> Picture:
        split, index = image
        return self.splits[split].load(index)

    def image_ids(self) -> list["ImageId"]:
        return [(name, i) for name, images in self.splits.items() for i in range(len(images))]

    def of_one_size(self, size: tuple[int, int], example: str) -> "Stored":
        """Refuse, on loading, images that have not the size (H, W) of the example."""

        def checked(images: StoredImages) -> StoredImages:
            return StoredImages(images.labels, _SizeChecked(images.load, size, example))

        return replace(self, **{name: checked(images) for name, images in self.splits.items()})

    def upright(self) -> "Stored":
        """Turn images as the EXIF of their files says."""
        turned = {name: upright(images) for name, images in self.splits.items()}
        return replace(self, **turned) if self.look.is_encoded else self

    def without(self, bad: Collection["ImageId"]) -> "Stored":
        """Leave out unreadable images; a class without others is an InputError."""
        kept = {}
        for split_name, images in self.splits.items():
            is_bad = np.zeros(len(images.labels), dtype=bool)
            is_bad[[index for split, index in bad if split == split_name]] = True
            for label in np.unique(images.labels[is_bad]):
                in_class = images.labels == label
                if is_bad[in_class].all():
                    first = images.load.name_of(int(in_class.argmax()))
                    raise InputError(
                        f"{first}: is unreadable, as are all {in_class.sum()} {split_name} images "
                        f"of class {self.class_names[label]!r}; repair or remove them"
                    )
            kept[split_name] = images.take(np.flatnonzero(~is_bad)) if is_bad.any() else images
        return replace(self, **kept)


ImageId = tuple[str, int]  # the split and the index in it


@dataclass(frozen=True)
class Wrapped:
    """Reads the images of another, which have the same names."""

    load: Load

    def __call__(self, index: int) -> Picture:
        return self.load(index)

    def name_of(self, index: int) -> str:
        return self.load.name_of(index)

    def marks(self) -> Iterable[bytes]:
        return self.load.marks()


def upright(images: StoredImages) -> StoredImages:
    """Turn images as the EXIF of their files says."""
    return StoredImages(images.labels, _Upright(images.load))


class _Upright(Wrapped):
    def __call__(self, index: int) -> Picture:
        return turned_upright(self.load(index))


@dataclass(frozen=True)
class _SizeChecked(Wrapped):
    size: tuple[int, int]
    example: str

    def __call__(self, index: int) -> Picture:
        picture = self.load(index)
        height, width = size_of(picture)
        if (height, width) != self.size:
            raise InputError(
                f"{self.name_of(index)}: is {width}×{height} pixels, but {self.example} is "
                f"{self.size[1]}×{self.size[0]}; resize all with `--image-size`"
            )
        return picture


@dataclass(frozen=True)
class InMemory:
    """Images that are in memory, such as an array, (n, h, w, C) uint8."""

    pictures: Sequence[Picture] | np.ndarray
    name: str

    def __call__(self, index: int) -> Picture:
        return self.pictures[index]

    def name_of(self, index: int) -> str:
        return f"{self.name}: image {index}"

    def marks(self) -> Iterable[bytes]:
        pictures = self.pictures
        shape = pictures.shape if isinstance(pictures, np.ndarray) else (len(pictures),)
        yield repr(shape).encode()
