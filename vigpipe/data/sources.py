"""Sources of images and labels: digits, CIFAR-10, a folder of images, or generated noise."""

import contextlib
import gzip
import hashlib
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vigpipe.data import images
from vigpipe.data.augment import Augmentation
from vigpipe.data.split import ImageSplit, Preparation, Split
from vigpipe.errors import InputError

CIFAR10_FOLDER = Path("data")
FAKE_SIZE = 224


@dataclass(frozen=True)
class Source:
    """Labelled images in two splits.

    Attributes:
        name: name of the source, or the path of its folder.
        class_names: name of each class, by label.
        channels: C, 1 for grey and 3 for colour.
        image_size: (H, W) of every image that `read` returns, in pixels.
        train: the train images.
        test: the test images.
        num_bad_images: number of unreadable images that were left out of both splits together.
    """

    name: str
    class_names: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]
    train: Split
    test: Split
    num_bad_images: int = 0

    def __post_init__(self) -> None:
        for split_name, split in (("train", self.train), ("test", self.test)):
            if len(split) == 0:
                raise InputError(f"{self.name}: there are no {split_name} images")
            low, high = split.labels.min(), split.labels.max()
            if low < 0 or high >= self.num_classes:
                raise InputError(
                    f"{self.name}: {split_name} labels lie in {low} … {high}, but with "
                    f"{self.num_classes} classes they belong in 0 … {self.num_classes - 1}"
                )

    @property
    def num_classes(self) -> int:
        """The number of classes; labels are 0 … num_classes − 1."""
        return len(self.class_names)


def open_source(
    name: str,
    *,
    data_dir: Path | None = None,
    download: bool = False,
    image_size: int | tuple[int, int] | None = None,
    mean: float = 0.0,
    std: float = 1.0,
    crop_pct: float = 1.0,
    augment: bool | Augmentation = False,
    seed: int = 0,
    skip_bad_images: bool = False,
    bad_images: Collection[Path] | None = None,
    num_fake_images: int = 1280,
    num_fake_classes: int = 10,
) -> Source:
    """Open a source of labelled images; images are decoded only if skip_bad_images is set.

    Args:
        name: `digits` (scikit-learn: 1,797 real 8×8 greys), `cifar10`, `fake` (noise), or a folder
            with train/<class>/<image> and test/<class>/<image>.
        data_dir: folder of the CIFAR-10 files; by default `data`.
        download: fetch CIFAR-10 if it is not there. In a run, one rank downloads before the others
            open the source.
        image_size: side of a square, or (H, W), in pixels: images are resized to cover it, and
            their centre is cropped. By default images keep their size, and all images of a folder
            must have the size of its first.
        mean: mean that is subtracted from the pixels, which lie in 0 … 1.
        std: standard deviation that the pixels are divided by afterwards.
        crop_pct: fraction of the side of a resized test image that is kept.
        augment: True crops and mirrors train images at random (digits are not mirrored, as a
            mirrored 2 is not a 2); an Augmentation applies timm's. Test images are never augmented.
        seed: seed of the augmentation and of the fake images; no split depends on it.
        skip_bad_images: decode every image of a folder once, and leave out those that fail.
        bad_images: images to leave out, if known already: those that `images.find_bad_images` found
            in `images.list_images` when the ranks share that work.
        num_fake_images: number of train images of `fake`; it has a fifth of that, but at least one,
            as test images.
        num_fake_classes: number of classes of `fake`.

    Returns:
        The train and test images with their labels.

    Raises:
        InputError: there is no such source, or its content is not as expected.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    preparation = Preparation(size, mean, std, crop_pct, augment, seed)
    if name == "digits":
        return _digits(preparation)
    if name == "cifar10":
        return _cifar10(data_dir or CIFAR10_FOLDER, download, preparation)
    if name == "fake":
        return _fake(num_fake_images, num_fake_classes, preparation)
    # Path's own expanduser raises RuntimeError for an unknown ~user.
    root = Path(os.path.expanduser(name))
    if not os.path.isdir(root):  # Path.is_dir raises OSError for a name of 300 letters
        raise InputError(
            f"{name}: no such data: it is neither one of digits, cifar10, fake nor a folder here"
        )
    return _folder(root, preparation, skip_bad_images, bad_images)


def _digits(preparation: Preparation) -> Source:
    values = _read_digits()  # (1797, 65): the 64 greys of an image, 0 … 16, and its label
    labels = values[:, -1]
    # With white at 240, resizing does not round to sixteenths, and 15 v / 240 is exactly v / 16.
    pixels = (values[:, :-1] * 15).astype(np.uint8).reshape(-1, 8, 8, 1)
    # Every fifth digit of each class, in an order that no random generator can change.
    order = sorted(range(len(labels)), key=lambda i: (labels[i], _hash(f"digits {i}")))
    test = sorted(order[::5])
    train = sorted(set(order) - set(test))
    return _in_memory(
        "digits",
        tuple(str(digit) for digit in range(10)),
        (pixels[train], labels[train].tolist()),
        (pixels[test], labels[test].tolist()),
        preparation,
        white=240,
        flip=False,
    )


def _read_digits() -> np.ndarray:
    """Read the file behind scikit-learn's load_digits; importing that function takes seconds.

    Returns:
        (1797, 65) int64: the greys of each image row by row, then its label.

    Raises:
        InputError: scikit-learn is missing, or keeps the file elsewhere.
    """
    package = find_spec("sklearn")  # finds the folder without importing the package
    init = Path((package and package.origin) or "sklearn/__init__.py")
    path = init.parent / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt") as file:
            return np.loadtxt(file, delimiter=",", dtype=np.int64)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: the digits cannot be read ({error}); they come with scikit-learn: "
            "pip install scikit-learn"
        ) from error


def _cifar10(folder: Path, download: bool, preparation: Preparation) -> Source:
    from torchvision.datasets import CIFAR10  # seconds to import

    try:
        train = CIFAR10(folder, train=True, download=download)
        test = CIFAR10(folder, train=False)
    except (OSError, RuntimeError) as error:
        if download:
            raise InputError(f"{folder}: CIFAR-10 could not be fetched ({error})") from error
        raise InputError(
            f"{folder}: holds no complete CIFAR-10 in cifar-10-batches-py/; add `--download` to "
            f"fetch it"
        ) from error
    return _in_memory(
        "cifar10",
        tuple(train.classes),
        (train.data, train.targets),
        (test.data, test.targets),
        preparation,
    )


def _in_memory(
    name: str,
    class_names: tuple[str, ...],
    train: tuple[np.ndarray, Sequence[int]],
    test: tuple[np.ndarray, Sequence[int]],
    preparation: Preparation,
    white: int = 255,
    flip: bool = True,
) -> Source:
    """Make a source of (n, h, w, C) uint8 arrays with their labels."""
    _, height, width, channels = train[0].shape
    size = preparation.image_size or (height, width)

    def split(pixels: np.ndarray, labels: Sequence[int], preparation: Preparation) -> Split:
        return ImageSplit(labels, pixels.__getitem__, channels, size, preparation, white, flip)

    return Source(
        name,
        class_names,
        channels,
        size,
        split(*train, preparation),
        split(*test, _plain(preparation)),
    )


def _fake(num_images: int, num_classes: int, preparation: Preparation) -> Source:
    """Make a source of noise, which is generated on reading; the label is index modulo classes."""
    if num_images < 1 or num_classes < 1:
        raise InputError(
            f"fake data has at least one image and one class (got {num_images} and {num_classes})"
        )
    size = preparation.image_size or (FAKE_SIZE, FAKE_SIZE)

    def split(split_name: str, num_images: int, preparation: Preparation) -> Split:
        load = _Noise(f"fake {split_name} {preparation.seed}", size)
        return ImageSplit(np.arange(num_images) % num_classes, load, 3, size, preparation)

    return Source(
        "fake",
        tuple(str(label) for label in range(num_classes)),
        3,
        size,
        split("train", num_images, preparation),
        split("test", max(1, num_images // 5), _plain(preparation)),
    )


@dataclass(frozen=True)
class _Noise:
    """Generates the noise image of an index."""

    name: str
    size: tuple[int, int]

    def __call__(self, index: int) -> np.ndarray:
        shape = (*self.size, 3)
        num_bytes = math.prod(shape)
        bits = np.random.PCG64(_hash(f"{self.name} {index}"))
        noise = np.asarray(bits.random_raw(num_bytes // 8 + 1)).view(np.uint8)
        return noise[:num_bytes].reshape(shape)


def _folder(
    root: Path, preparation: Preparation, skip_bad_images: bool, bad_images: Collection[Path] | None
) -> Source:
    train_folder, test_folder = images.split_folders(root)
    train, test = images.list_classes(train_folder), images.list_classes(test_folder)
    unknown = [name for name in test if name not in train]
    if unknown:
        raise InputError(
            f"{test_folder / unknown[0]}: {train_folder} has no class {unknown[0]!r}; the test "
            f"classes are among the train classes ({len(unknown)} of {len(test)} are not)"
        )
    if bad_images is None:
        paths = [path for classes in (train, test) for paths in classes.values() for path in paths]
        bad_images = images.find_bad_images(paths) if skip_bad_images else ()
    bad = frozenset(bad_images)
    class_names = tuple(train)
    label_of = {name: label for label, name in enumerate(class_names)}
    num_bad_images = 0
    for classes in (train, test):
        for name, paths in classes.items():
            classes[name] = [path for path in paths if path not in bad]
            num_bad_images += len(paths) - len(classes[name])
            if not classes[name]:
                raise InputError(
                    f"{paths[0].parent}: all {len(paths)} images of class {name!r} are "
                    f"unreadable; repair them or remove the folder"
                )
    if preparation.image_size:
        size, size_of = preparation.image_size, None
    else:
        size_of, size = _first_size(train, skip_bad_images)

    def split(classes: dict[str, list[Path]], preparation: Preparation) -> Split:
        paths = [path for name in classes for path in classes[name]]
        labels = [label_of[name] for name in classes for _ in classes[name]]

        load = _Files(paths, size, size_of)
        return ImageSplit(labels, load, 3, size, preparation, cache=True)

    return Source(
        str(root),
        class_names,
        3,
        size,
        split(train, preparation),
        split(test, _plain(preparation)),
        num_bad_images,
    )


@dataclass(frozen=True)
class _Files:
    """Reads image files; with `size_of`, requires that all have the (H, W) of that file."""

    paths: list[Path]
    size: tuple[int, int]
    size_of: Path | None

    def __call__(self, index: int) -> np.ndarray:
        pixels, size = images.read_image(self.paths[index]), self.size
        if self.size_of and pixels.shape[:2] != size:
            raise InputError(
                f"{self.paths[index]}: is {pixels.shape[1]}×{pixels.shape[0]} pixels, but "
                f"{self.size_of} is {size[1]}×{size[0]}; resize all with `--image-size`"
            )
        return pixels


def _first_size(
    classes: dict[str, list[Path]], skip_bad_images: bool
) -> tuple[Path, tuple[int, int]]:
    """Find the first image, or the first whose header can be read, and its (H, W)."""
    paths = [path for name in classes for path in classes[name]]
    for path in paths if skip_bad_images else ():
        with contextlib.suppress(InputError):
            return path, images.image_size(path)
    return paths[0], images.image_size(paths[0])


def _plain(preparation: Preparation) -> Preparation:
    return replace(preparation, augment=False)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
