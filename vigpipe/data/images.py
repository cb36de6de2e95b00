"""Find the image files of a folder, decode them, and report those that cannot be read."""

import errno
import io
import os
import stat
import warnings
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from vigpipe.errors import InputError
from vigpipe.files.names import escaped, is_plain

EXTENSIONS = (
    ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
# Pillow goes by a file's content, not its name, and by default it also tries formats for which it
# starts programs (EPS).
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
LARGEST_BYTES = 1 << 29  # of a file: Pillow's MAX_IMAGE_PIXELS with 16 bits for R, G and B each
LARGEST_RATIO = 256  # of the sides, because resizing the shorter one enlarges the longer one too
# Pillow only warns of a decompression bomb, up to twice MAX_IMAGE_PIXELS.
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
NUM_THREADS = min(8, _NUM_CORES or 1)  # Pillow releases the GIL while it decodes
_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0  # TIFF 6.0, section 8
NOT_THE_FILES_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def split_folders(root: Path) -> tuple[Path, Path]:
    """Find the folders of the train and the test images: train/ and test/ (or val/).

    Raises:
        InputError: one of them is missing.
    """
    train = root / "train"
    test = root / "test" if os.path.isdir(root / "test") else root / "val"
    for folder, names in ((train, "train/"), (test, "test/ or val/")):
        if not os.path.isdir(folder):
            _entries(root)  # raises if root cannot be listed
            raise InputError(
                f"{root}: has no folder {names}; images are expected as train/<class>/<image> "
                f"and test/<class>/<image>"
            )
    return train, test


def list_classes(folder: Path) -> dict[str, list[Path]]:
    """List the image files of every class folder, sorted by name, without opening any.

    Class folders may contain folders and may be links. A folder that is reached twice is listed
    once. A folder that contains the class folder is not listed, even if a link leads back to it,
    because it contains other classes. Hidden files and names without an image's extension are left
    out. A folder is a folder even if it is called `x.png`. A broken link to an image is listed, so
    that reading it reports the error.

    Returns:
        The paths of the images by the name of their class.

    Raises:
        InputError: there are no class folders, one holds no image, one cannot be listed, or its
            name is not text on one line.
    """
    entries = _entries(folder)
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry):
            raise InputError(
                f"{entry.path}: is a link that leads nowhere, where a class folder is expected; "
                "mend or remove it"
            )
    names = [entry.name for entry in entries if _is_folder(entry)]
    if not names:
        raise InputError(
            f"{folder}: has no class folders; images are expected as {folder.name}/<class>/<image>"
        )
    for name in names:
        if not is_plain(name):  # it could not be kept with the weights, or not be printed
            raise InputError(
                f"{folder}: the class folder {escaped(name)} has control characters in its name, "
                "or bytes that are not UTF-8; rename it"
            )
    classes = {name: images_below(folder / name, _above(folder / name)) for name in names}
    for name, paths in classes.items():
        if not paths:
            raise InputError(
                f"{folder / name}: class {name!r} has no images; add some "
                f"({', '.join(EXTENSIONS)}) or remove the folder"
            )
    return classes


def list_images(root: Path) -> list[Path]:
    """List all images of the folder: those of train, then those of test, each in label order.

    Raises:
        InputError: in the cases of `split_folders` and `list_classes`.
    """
    return [
        path
        for folder in split_folders(root)
        for paths in list_classes(folder).values()
        for path in paths
    ]


def read_image(path: Path) -> np.ndarray:
    """Decode one image file, the first frame of an animation, to (H, W, 3) uint8 RGB.

    Transparent pixels are put on white. CMYK is converted to RGB without a colour profile. Of 16
    bits per channel the upper 8 are kept: Pillow itself does so for colours, but leaves 16-bit
    greys unchanged (mode I;16, or I from PGM), and converting those would turn all values above 255
    white. Of 12-bit greys, the lower 4 bits are dropped. An orientation in EXIF is not applied, as
    in torchvision and timm.

    Raises:
        InputError: the file cannot be read or decoded; the message gives path, reason and advice.
    """
    try:
        return rgb_pixels(_open(path))
    except Exception as error:
        raise _bad_image(path, error) from error


def rgb_pixels(image: Image.Image) -> np.ndarray:
    """Return the pixels of an opened image, as `read_image` does: (H, W, 3) uint8 RGB."""
    return np.asarray(_to_rgb(image))


def image_size(path: Path) -> tuple[int, int]:
    """Read (H, W) in pixels from the file's header.

    Raises:
        InputError: the file or its header cannot be read.
    """
    try:
        image = _open(path)
        return image.height, image.width
    except Exception as error:
        raise _bad_image(path, error) from error


def find_bad_images(paths: Iterable[Path]) -> dict[Path, str]:
    """Decode every image once, in threads, and return the paths of those that fail, with reasons.

    The result is in the order of the paths, so ranks may share the work (`paths[rank::world_size]`)
    and merge their results.
    """
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        paths = list(paths)
        reasons = threads.map(_reason_if_bad, paths)
        return {path: reason for path, reason in zip(paths, reasons, strict=True) if reason}


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed ({error.strerror})") from error
    return sorted(visible, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a folder; only links need a system call, since files may be many."""
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()


def _identity(folder: Path) -> tuple[int, int]:
    try:
        status = folder.stat()
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed ({error.strerror})") from error
    return status.st_dev, status.st_ino


def _above(folder: Path) -> set[tuple[int, int]]:
    """Return the identities of the folders that contain this folder and, if a link, its target."""
    target, here = os.path.realpath(folder), os.path.realpath(folder.parent)
    return {_identity(path) for path in (*Path(target).parents, *Path(here, folder.name).parents)}


def images_below(folder: Path, above: Collection[tuple[int, int]] = ()) -> list[Path]:
    """List the images in a folder and in all folders below it.

    Args:
        folder: where to start.
        above: identities of folders not to enter, from `_identity`.

    Returns:
        Paths sorted by name, with each folder entered once.
    """
    paths: list[Path] = []
    seen = set(above)
    pending = [(folder, True)]  # recursion would fail at a depth of 1000
    while pending:
        path, is_folder = pending.pop()
        if not is_folder:
            paths.append(path)
        elif (identity := _identity(path)) not in seen:
            seen.add(identity)
            for entry in reversed(_entries(path)):
                if _is_folder(entry):
                    pending.append((path / entry.name, True))
                elif entry.name.lower().endswith(EXTENSIONS):
                    pending.append((path / entry.name, False))
    return paths


def _open(path: Path) -> Image.Image:
    """Open without decoding. The whole file is read, so that no file stays open."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait for ever
        raise OSError("not a regular file")
    if status.st_size > LARGEST_BYTES:
        raise OSError(f"its {status.st_size} bytes are more than {LARGEST_BYTES}")
    data = path.read_bytes()
    if not data:
        raise OSError("the file is empty")
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if not 0 < max(image.size) <= LARGEST_RATIO * min(image.size):
        raise ValueError(
            f"{image.width}×{image.height} pixels, where one side is at most {LARGEST_RATIO} times "
            "the other"
        )
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    is_16_bit = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    clear = image.info.get("transparency")  # a colour in the file's bits; Pillow compares 8 bits
    if clear is not None and (is_16_bit or (isinstance(clear, tuple) and max(clear) > 255)):
        raise ValueError("a transparent colour of 16 bits")
    if is_16_bit:  # convert() would turn all values above 255 white
        tags = getattr(image, "tag_v2", {})  # in a TIFF, 0 may stand for white
        grey = np.asarray(image) >> (tags.get(_BITS, (16,))[0] - 8)
        grey = 255 - grey if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else grey
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode!r} have no known range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _reason_if_bad(path: Path) -> str | None:
    try:
        read_image(path)
    except InputError as error:
        return _reason(error.__cause__ or error)
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, Image.UnidentifiedImageError):  # its message would mention a BytesIO
        return "not an image, or of an unknown format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _bad_image(path: Path, error: Exception) -> Exception:
    """Turn an exception of Pillow, of whatever type, into an InputError that names the file."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in NOT_THE_FILES_FAULT:
        return error
    return InputError(
        f"{path}: cannot be read as an image ({_reason(error)}); repair or remove it, or leave "
        f"unreadable images out with `--skip-bad-images`"
    )
