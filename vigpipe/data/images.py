"""Decode images, and find those that cannot be decoded."""

import contextlib
import io
import stat
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, features

from vigpipe.data.picture import KIND, ORIENTATION
from vigpipe.errors import InputError, TooLarge, UnreadableImage
from vigpipe.files.untrusted import NOT_THE_FILES_FAULT
from vigpipe.launch.environment import num_cores
from vigpipe.launch.failures import reading

_ENDINGS = {
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "JPEG": (".jfif", ".jpe", ".jpeg", ".jpg"),
    "PNG": (".png",),
    "PPM": (".pbm", ".pgm", ".pnm", ".ppm"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2",),
}
# What Pillow may have been built without; version 11.0 has not heard of the first yet.
_MISSING = {
    name
    for name, part in (("AVIF", "avif"), ("JPEG2000", "jpg_2000"))
    if part not in {*features.modules, *features.codecs} or not features.check(part)
}
# Pillow goes by a file's content, not its name, and by default it also tries formats for which it
# starts programs (EPS).
FORMATS = tuple(name for name in _ENDINGS if name not in _MISSING)
EXTENSIONS = tuple(sorted(ending for name in FORMATS for ending in _ENDINGS[name]))
LARGEST_BYTES = 1 << 29  # Pillow's MAX_IMAGE_PIXELS with 16 bits for R, G and B each
LARGEST_RATIO = 256  # Resizing the shorter side of an image enlarges the longer one too.
# Pillow only warns of a decompression bomb, up to twice MAX_IMAGE_PIXELS.
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
NUM_THREADS = min(8, num_cores())  # Pillow releases the GIL while it decodes
_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0  # TIFF 6.0, section 8
_ORIENTATION = 274  # Exif 2.3, section 4.6.4


def read_image(path: Path) -> Image.Image:
    """Decode one image file, as `decode` does; InputError if it cannot be read or decoded."""
    try:
        with reading(str(path)):
            content = _content(path)
    except Exception as error:
        raise _bad_image(str(path), error) from error
    return decode(content, str(path))


def decode(content: bytes, name: str) -> Image.Image:
    """Decode an image file, or an animation's first frame, to RGB; errors begin with the name."""
    try:
        with reading(name):
            return to_rgb(_opened(content))
    except Exception as error:
        raise _bad_image(name, error) from error


def is_image(name: str) -> bool:
    """Whether a file's name is one of an image, by its suffix."""
    return name.lower().endswith(EXTENSIONS)


Item = TypeVar("Item")


def find_bad_images(load: Callable[[Item], object], items: Sequence[Item]) -> list[Item]:
    """Decode images once, in threads, and return those that fail, in the order of the items."""

    def is_bad(item: Item) -> bool:
        try:
            load(item)
        except TooLarge:  # It may be read when memory is there.
            raise
        except InputError:
            return True
        return False

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return [item for item, bad in zip(items, threads.map(is_bad, items), strict=True) if bad]


def _content(path: Path) -> bytes:
    """Read the whole file, so that no file stays open."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # Opening a FIFO would wait for ever.
        raise OSError("not a regular file")
    if status.st_size > LARGEST_BYTES:
        raise OSError(f"its {status.st_size} bytes are more than {LARGEST_BYTES}")
    return path.read_bytes()


def _opened(content: bytes) -> Image.Image:
    """Open without decoding."""
    if not content:
        raise OSError("the file is empty")
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    if not 0 < max(image.size) <= LARGEST_RATIO * min(image.size):
        raise ValueError(
            f"{image.width}×{image.height} pixels, where one side is at most {LARGEST_RATIO} times "
            "the other"
        )
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode an opened image to RGB, as `_in_rgb` does; its `info` says what the file was like."""
    said: dict[str | tuple[int, int], Any] = {KIND: _kind_of(image)}
    if ORIENTATION in image.info:  # it was decoded before
        said = {name: image.info[name] for name in (ORIENTATION, KIND)}
    rgb = _in_rgb(image)
    if ORIENTATION not in said:
        said[ORIENTATION] = None
        with contextlib.suppress(Exception):  # an image whose EXIF is damaged stays as it is
            # Pillow has turned a TIFF while it decoded it, and removed its orientation.
            said[ORIENTATION] = image.getexif().get(_ORIENTATION)
    rgb.info |= said
    return rgb


def _kind_of(image: Image.Image) -> str:
    """Say what an opened image has besides three channels; nothing if it has just these."""
    if image.has_transparency_data:
        return "with transparent pixels"
    if image.mode in ("1", "L", "I", "F") or image.mode.startswith("I;16"):
        return "grey"
    return "" if image.mode in ("RGB", "P") else image.mode


def _in_rgb(image: Image.Image) -> Image.Image:
    """Decode an opened image to RGB.

    Transparent pixels are put on white. CMYK is converted to RGB without a colour profile. Of 16
    bits per channel the upper 8 are kept: Pillow itself does so for colours, but leaves 16-bit
    greys unchanged (mode I;16, or I from PGM), and converting those would turn all values above 255
    white. Of 12-bit greys, the lower 4 bits are dropped. An orientation in EXIF is not applied here
    (`vigpipe.data.picture.turned_upright`). Pixels of an unknown range are a ValueError; for what
    it cannot decode, Pillow raises exceptions of any type.
    """
    is_16_bit = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    clear = image.info.get("transparency")  # a colour in the file's bits; Pillow compares 8 bits
    if clear is not None and (is_16_bit or (isinstance(clear, tuple) and max(clear) > 255)):
        raise ValueError("a transparent colour of 16 bits")
    if is_16_bit:
        tags = getattr(image, "tag_v2", {})  # 0 may stand for white in a TIFF.
        grey = np.asarray(image) >> (tags.get(_BITS, (16,))[0] - 8)
        grey = 255 - grey if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else grey
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode!r} have no known range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    image.load()  # This decodes it here, where its errors are understood.
    return image if image.mode == "RGB" else image.convert("RGB")  # convert() copies any image.


def in_channels(image: Image.Image, channels: int) -> Image.Image:
    """Turn an RGB image grey for a model of one channel."""
    return image if channels == 3 else image.convert("L")


def _reason(error: BaseException) -> str:
    if isinstance(error, Image.UnidentifiedImageError):  # Its message would mention a BytesIO.
        return "not an image, or of an unknown format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _bad_image(name: str, error: Exception) -> Exception:
    """Turn an exception of Pillow into an InputError, unless the image is not to blame."""
    if isinstance(error, TooLarge) or getattr(error, "errno", None) in NOT_THE_FILES_FAULT:
        return error
    return UnreadableImage(
        f"{name}: cannot be read as an image ({_reason(error)}); repair or remove it"
    )
