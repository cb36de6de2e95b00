"""Sources of images and labels: digits, CIFAR-10, data sets in files, or generated noise."""

import contextlib
import gzip
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from vigpipe.data import formats
from vigpipe.data.augment import Augmentation
from vigpipe.data.images import NUM_THREADS, find_bad_images
from vigpipe.data.picture import KIND, ORIENTATION, size_of
from vigpipe.data.split import Preparation, Split
from vigpipe.data.stored import ImageId, InMemory, Load, Look, Stored, StoredImages
from vigpipe.data.transforms import hash_64
from vigpipe.data.validation import hold_out
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import per_channel
from vigpipe.launch.failures import reading
from vigpipe.messages import plural

CIFAR10_FOLDER = Path("data")
FAKE_SIZE = 224
_NUM_LOOKED_AT = 16  # images that are decoded to say what kinds there are


@dataclass(frozen=True)
class Source:
    """Labelled images to train on and to test with, and perhaps some for validation.

    Attributes:
        name: name of the source, or the path of its folder or file.
        class_names: name of each class, by label.
        channels: C, 1 for grey and 3 for colour.
        image_size: (H, W) of every image that `read` returns, in pixels.
        train: the train images, without those of `validation`.
        test: the test images.
        bad_images: names of the unreadable images that were left out, train images first.
        stored: the images that were not left out, as they are stored, those that were held out
            among the train images; None for images that do not come from `open_source`.
        validation: train images that are held out of training; None if there are none.
    """

    name: str
    class_names: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]
    train: Split
    test: Split
    bad_images: tuple[str, ...] = ()
    stored: Stored | None = None
    validation: Split | None = None

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
    def splits(self) -> tuple[Split, ...]:
        """The train images, the test images and, if there are any, the validation images."""
        both = (self.train, self.test)
        return both if self.validation is None else (*both, self.validation)

    def split(self, name: str) -> Split:
        """Return the images of `train`, `test` or, if there are any, `validation`."""
        split = {"train": self.train, "test": self.test, "validation": self.validation}[name]
        assert split is not None
        return split

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
    mean: float | tuple[float, ...] = 0.0,
    std: float | tuple[float, ...] = 1.0,
    crop_pct: float = 1.0,
    augment: bool | Augmentation = False,
    seed: int = 0,
    validation: float = 0.0,
    test: float = 0.0,
    exif: bool = True,
    skip_bad_images: bool = False,
    bad_images: Collection[ImageId] | None = None,
    num_fake_images: int = 1280,
    num_fake_classes: int = 10,
) -> Source:
    """Open a source of labelled images; a few are decoded, or all if skip_bad_images is set.

    Args:
        name: `digits` (scikit-learn: 1,797 real 8×8 greys), `cifar10`, `fake` (noise), or a folder
            or file in one of the formats of `data/formats`.
        data_dir: folder of the CIFAR-10 files; by default `data`.
        download: fetch CIFAR-10 if it is not there. In a run, one rank downloads before the others
            open the source.
        image_size: side of a square, or (H, W), in pixels: images are resized to cover it, and
            their centre is cropped. By default images keep their size, and all images of a folder
            must have the size of its first.
        mean: mean that is subtracted from the pixels, which lie in 0 … 1, or that of each channel;
            of grey images, the mean of these.
        std: standard deviation that the pixels are divided by afterwards, likewise.
        crop_pct: fraction of the side of a resized test image that is kept.
        augment: True crops and mirrors train images at random (digits are not mirrored, as a
            mirrored 2 is not a 2); an Augmentation applies timm's. Test and validation images are
            never augmented.
        seed: seed of the augmentation, of the fake images, and of which train images are held out;
            images that a data set has for the test do not depend on it.
        validation: share of the train images of each class that is held out for validation, after
            unreadable images and those of `test` have been left out; 0 for none.
        test: share of the images of each class that is held out for the test, of a data set without
            test images of its own.
        exif: turn images as the EXIF of their files says.
        skip_bad_images: decode every image once, and leave out those that fail.
        bad_images: images to leave out, if known already, as when the ranks share the search.
        num_fake_images: number of train images of `fake`; it has a fifth of that, but at least one,
            as test images.
        num_fake_classes: number of classes of `fake`.

    Raises:
        InputError: there is no such source, its content is not as expected, or no image can be held
            out.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if size is not None and min(size) < 1:
        raise InputError(f"`--image-size` is at least 1 (got {size[0]}×{size[1]})")
    if name == "fake":
        size = size or (FAKE_SIZE, FAKE_SIZE)
        stored = _fake(num_fake_images, num_fake_classes, size, seed)
    else:
        name, stored = find_images(name, data_dir, formats.read, download=download)
    labels = np.unique(stored.train.labels)
    if not len(labels):
        raise InputError(
            f"{name}: has no train images; images are expected as train/<class>/<image> and "
            "test/<class>/<image>, or as <class>/<image> with --test 0.2"
        )
    if len(labels) == 1:
        raise InputError(
            f"{name}: all {len(stored.train):,} training images are of one class, "
            f"{stored.class_names[labels[0]]!r}, and there is nothing to tell apart; add images of "
            "another class"
        )
    if bad_images is None:
        bad_images = find_bad_images(stored.load, stored.image_ids()) if skip_bad_images else ()
    bad_names = tuple(
        images.load.name_of(index)
        for split, images in stored.splits.items()
        for index in sorted(index for of_split, index in bad_images if of_split == split)
    )
    stored = stored.without(bad_images)
    stored = replace(stored, notes=(*stored.notes, *_what_is_odd(stored, exif=exif)))
    if exif:
        stored = stored.upright()
    if size is None:
        size, example = _first_size(stored.train, skip_bad_images)
        stored = stored.of_one_size(size, example)
    divided = with_test_images(stored, test, seed, name)
    train, held_out = divided.train, divided.validation
    if validation:
        if held_out is not None:
            raise InputError(
                f"--validation {validation}: {name} has validation images of its own; leave it out"
            )
        train, held_out = hold_out(train, validation, seed)
    mean, std = (
        per_channel(v if isinstance(v, tuple) else (v,), stored.look.channels) for v in (mean, std)
    )
    preparation = Preparation(size, mean, std, crop_pct, augment, seed)
    unaugmented = replace(preparation, augment=False)
    return Source(
        name,
        stored.class_names,
        stored.look.channels,
        size,
        Split(train, stored.look, preparation),
        Split(divided.test, stored.look, unaugmented),
        bad_names,
        stored,
        None if held_out is None else Split(held_out, stored.look, unaugmented),
    )


def find_images(
    name: str,
    data_dir: Path | None,
    read: Callable[[Path], Stored],
    *,
    download: bool = False,
) -> tuple[str, Stored]:
    """Find the images that --data names, but for fake ones, and return what they are called.

    Files and folders are read by `read`, a function of `vigpipe.data.formats`.
    """
    if name == "digits":
        return name, _digits()
    if name == "cifar10":
        return name, _cifar10(data_dir or CIFAR10_FOLDER, download)
    # Path's own expanduser raises RuntimeError for an unknown ~user.
    path = Path(os.path.expanduser(name))
    if "://" in name or name.startswith("pipe:"):
        raise InputError(
            f"{name}: is an address or a pipe, but each image is read from files, in any order; "
            "download them and name their folder"
        )
    if not os.path.exists(path):  # Path.exists raises OSError for a name of 300 letters
        raise InputError(
            f"{name}: no such data: it is neither one of digits, cifar10, fake nor a folder or "
            "file here"
        )
    with reading(str(path)):
        return str(path), read(path)


def with_test_images(stored: Stored, share: float, seed: int, name: str) -> Stored:
    """Hold a share of the train images out as test images, where a data set has none of its own."""
    if len(stored.test):
        if share:
            raise InputError(f"--test {share}: {name} has test images of its own; leave it out")
        return stored
    if not len(stored.train):
        raise InputError(
            f"{name}: has no train images, of which --test {share} could hold some out"
        )
    if not share:
        raise InputError(
            f"{name}: has no test images; say which share of the images of each class is held out "
            "as such, as --test 0.2 does, or add a folder test/"
        )
    train, test = hold_out(stored.train, share, hash_64(f"test images {seed}"), "--test")
    return replace(stored, train=train, test=test)


def _what_is_odd(stored: Stored, *, exif: bool) -> list[str]:
    """Decode some train images, and say which are unlike what the model takes of them."""
    if not stored.look.is_encoded or not len(stored.train):
        return []
    numbers = np.unique(np.linspace(0, len(stored.train) - 1, _NUM_LOOKED_AT).astype(int))
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        said = [*threads.map(partial(_said_by, stored.train.load), numbers.tolist())]
    of_some = f"of {plural(len(numbers), 'train image')} looked at, "
    kinds = Counter(kind for kind, _ in said if kind)
    notes = []
    if kinds:
        found = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))
        notes.append(f"{of_some}{found}: all are read as RGB, transparent pixels as white")
    num_turned = sum(orientation not in (None, 1) for _, orientation in said)
    if num_turned:
        how = "all such are turned upright" if exif else "none is turned, as --no-exif says"
        notes.append(f"{of_some}{num_turned:,} with an orientation in EXIF: {how}")
    return notes


def _said_by(load: Load, index: int) -> tuple[str, int | None]:
    """Return the kind and the orientation of an image; nothing of one that cannot be read."""
    with contextlib.suppress(InputError):  # told when it is read
        picture = load(index)
        if isinstance(picture, Image.Image):
            return picture.info.get(KIND, ""), picture.info.get(ORIENTATION)
    return "", None


def _first_size(images: StoredImages, skip_bad_images: bool) -> tuple[tuple[int, int], str]:
    """Return (H, W) of the first image, or of the first that can be read, and its name."""
    for index in range(len(images.labels)) if skip_bad_images else ():
        with contextlib.suppress(InputError):
            return size_of(images.load(index)), images.load.name_of(index)
    return size_of(images.load(0)), images.load.name_of(0)


def _digits() -> Stored:
    values = _read_digits()  # (1797, 65): the 64 greys of an image, 0 … 16, and its label
    labels = values[:, -1]
    # With white at 240, resizing does not round to sixteenths, and 15 v / 240 is exactly v / 16.
    pixels = (values[:, :-1] * 15).astype(np.uint8).reshape(-1, 8, 8, 1)
    # Every fifth digit of each class, in an order that no random generator can change.
    order = sorted(range(len(labels)), key=lambda i: (labels[i], hash_64(f"digits {i}")))
    test = sorted(order[::5])
    train = sorted(set(order) - set(test))
    return Stored(
        tuple(str(digit) for digit in range(10)),
        StoredImages(labels[train], InMemory(pixels[train], "digits")),
        StoredImages(labels[test], InMemory(pixels[test], "digits")),
        Look(channels=1, white=240, flip=False, is_encoded=False),
    )


def _read_digits() -> np.ndarray:
    """Read the file behind scikit-learn's load_digits; importing that function takes seconds."""
    package = find_spec("sklearn")  # This does not import the package.
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


def _cifar10(folder: Path, download: bool) -> Stored:
    from torchvision.datasets import CIFAR10  # Importing it takes seconds.

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
    return Stored(
        tuple(train.classes),
        StoredImages(np.asarray(train.targets), InMemory(train.data, "cifar10")),
        StoredImages(np.asarray(test.targets), InMemory(test.data, "cifar10")),
        Look(is_encoded=False),
    )


def _fake(num_images: int, num_classes: int, size: tuple[int, int], seed: int) -> Stored:
    """Make a data set of noise, generated on reading; the label is index modulo classes."""
    if num_images < 1 or num_classes < 1:
        raise InputError(
            f"fake data has at least one image and one class (got {num_images} and {num_classes})"
        )

    def images(split: str, num_images: int) -> StoredImages:
        labels = np.arange(num_images) % num_classes
        return StoredImages(labels, _Noise(f"fake {split} {seed}", size))

    return Stored(
        tuple(str(label) for label in range(num_classes)),
        images("train", num_images),
        images("test", max(1, num_images // 5)),
        Look(is_encoded=False),
    )


@dataclass(frozen=True)
class _Noise:
    """Loads images of noise, which depend on the name and the index."""

    name: str
    size: tuple[int, int]

    def __call__(self, index: int) -> np.ndarray:
        shape = (*self.size, 3)
        num_bytes = math.prod(shape)
        bits = np.random.PCG64(hash_64(f"{self.name} {index}"))
        noise = np.asarray(bits.random_raw(num_bytes // 8 + 1)).view(np.uint8)
        return noise[:num_bytes].reshape(shape)

    def name_of(self, index: int) -> str:
        return f"{self.name} {index}"

    def marks(self) -> Iterable[bytes]:
        yield repr(self.size).encode()
