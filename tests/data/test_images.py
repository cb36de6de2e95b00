"""Images from strangers: each is read as defined, or is bad with its name, and none costs much."""

import errno
import io
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.refusals import check_refusals
from vigpipe.data import images, open_source
from vigpipe.data.picture import to_array, turned_upright
from vigpipe.errors import InputError

# Pillow warns of what it can do without, as of a cut EXIF; outside of tests that is no error.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

RED, GREEN = (250, 0, 0), (0, 250, 0)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, bits, colours, rows, *chunks):
    """Write a PNG by hand: rows are the raw bytes, each row behind a filter byte."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + data + chunk(b"IEND", b"")


def tiff(bits, photometric, data, width=2):
    """Write an uncompressed grey TIFF of one row by hand."""
    tags = {256: width, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 278: 1, 279: len(data)}
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    data += b"\0" * (len(data) % 2)
    start = b"II*\0" + struct.pack("<I", 8 + len(data)) + data
    return start + struct.pack("<H", len(tags)) + entries + bytes(4)


def saved(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def flat(colour, mode="RGB"):
    return Image.new(mode, (2, 1), colour)


def animated(format, **options):
    return saved(flat(RED), format, save_all=True, append_images=[flat(GREEN)], **options)


def noise(format, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels), format, **options)


def half_transparent():
    image = Image.new("RGBA", (2, 1), (*RED, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))  # black, but not to be seen
    return image


def palette():
    pixels = Image.fromarray(np.array([[RED, GREEN]], dtype=np.uint8))
    return pixels.convert("P", palette=Image.Palette.ADAPTIVE)


# --- what is read, and as what ---------------------------------------------------------------

DARK, WHITE = [0x12] * 3, [0xFF] * 3
COLOURS = struct.pack(">6H", 0x1234, 0xFFFF, 0x8000, 0, 0xFF, 0x100)
READ = {
    "rgb.png": (saved(flat(RED), "png"), [RED] * 2),
    "one bit.png": (saved(flat(1, "1"), "png"), [WHITE] * 2),
    "transparent.png": (saved(half_transparent(), "png"), [RED, WHITE]),
    "transparent grey.png": (saved(flat((0, 0), "LA"), "png"), [WHITE] * 2),
    "palette.png": (saved(palette(), "png"), [RED, GREEN]),
    "16-bit grey.png": (png(2, 1, 16, 0, b"\0\x12\x34\xff\xff"), [DARK, WHITE]),
    "16-bit colours.png": (png(2, 1, 16, 2, b"\0" + COLOURS), [[0x12, 0xFF, 0x80], [0, 0, 1]]),
    "16-bit grey with alpha.png": (
        png(2, 1, 16, 4, b"\0" + struct.pack(">4H", 0x1234, 0xFFFF, 0x1234, 0)),
        [DARK, WHITE],
    ),
    "16-bit grey.tiff": (tiff(16, 1, b"\x34\x12\xff\xff"), [DARK, WHITE]),
    "16-bit grey, white is 0.tiff": (tiff(16, 0, b"\xcb\xed\0\0"), [DARK, WHITE]),
    "12-bit grey.tiff": (tiff(12, 1, b"\x12\x3f\xff"), [DARK, WHITE]),
    "16-bit grey.pgm": (b"P5 2 1 65535\n\x12\x34\xff\xff", [DARK, WHITE]),
    "grey up to 1000.pgm": (b"P5 2 1 1000\n" + struct.pack(">2H", 71, 1000), [DARK, WHITE]),
    "cmyk.jpg": (saved(flat((0, 255, 255, 0), "CMYK"), "jpeg", quality=100), [[255, 0, 0]] * 2),
    "animated.gif": (animated("gif"), [RED] * 2),
    "animated.webp": (animated("webp", lossless=True), [RED] * 2),
    "two pages.tiff": (animated("tiff"), [RED] * 2),
    "as thin as may be.png": (png(256, 1, 8, 0, bytes([0] + [7] * 256)), [[7] * 3] * 256),
    "a jpeg.png": (saved(flat(GREEN), "jpeg", quality=100), [GREEN] * 2),
    "as browsers save it.JFIF": (saved(flat(GREEN), "jpeg", quality=100), [GREEN] * 2),
    "black and white.pbm": (saved(flat(1, "1"), "ppm"), [WHITE] * 2),
}
for name, kind, options in (("AVIF", ".avif", {"quality": 100}), ("JPEG2000", ".jp2", {})):
    if name in images.FORMATS:  # Pillow may have been built without.
        READ[f"x{kind}"] = (saved(flat(RED), name, **options), [RED] * 2)


@pytest.mark.parametrize("name", READ)
def test_every_kind_of_image_becomes_rgb_by_its_content(tmp_path, name):
    content, expected = READ[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert images.is_image(name)
    image = images.read_image(path)
    assert image.mode == "RGB"
    np.testing.assert_allclose(to_array(image)[0], expected, atol=2)  # jpeg rounds
    assert images.find_bad_images(images.read_image, [path]) == []


def test_a_transparent_colour_of_a_palette_becomes_white(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(saved(palette(), "png", transparency=bytes([0])))
    row = to_array(images.read_image(path))[0].tolist()
    assert row.count(WHITE) == 1  # which colour is entry 0 is up to Pillow


# --- what is refused -------------------------------------------------------------------------

REFUSED = [
    (b"", "the file is empty"),
    (b"<html><body>404 Not Found</body></html>", "not an image"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    (noise("png")[:400], "truncated"),
    (noise("png").replace(b"IDAT", b"iDAT"), ""),
    (png(1, 1, 16, 0, b"\0\0\0", chunk(b"tRNS", b"\0\0")), "a transparent colour of 16 bits"),
    (png(1, 1, 16, 2, bytes(7), chunk(b"tRNS", b"\x12\x34" + bytes(4))), "a transparent colour"),
    (tiff(32, 1, bytes(8)), "have no known range"),
    (b"GIF89a" + bytes(7) + b"," + bytes(9) + b"\x02\x00;", ""),  # without a size
    (png(257, 1, 8, 0, bytes(258)), "257×1 pixels, where one side is at most 256 times"),
    (png(9_500, 9_500, 1, 0, b""), "decompression bomb"),  # Pillow warns only
    (png(1, 1, 8, 0, bytes(2), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 22)))), ""),
]
ADVICE = ".*; repair or remove it$"  # the option is for commands that have it


def test_what_is_no_image_is_found_and_named(tmp_path):
    path = tmp_path / "x.png"

    def read(content):
        path.write_bytes(content)
        assert images.find_bad_images(images.read_image, [path]) == [path]
        images.read_image(path)

    rows = [(content, words + ADVICE) for content, words in REFUSED]
    check_refusals(rows, read, rf"^{path}: cannot be read as an image \(.*")


def test_files_that_hold_no_image_are_bad_and_are_not_read(tmp_path, monkeypatch):
    paths = {
        name: tmp_path / f"{name}.png" for name in ("large", "nowhere", "loop", "pipe", "device")
    }
    with paths["large"].open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    paths["nowhere"].symlink_to(tmp_path / "missing.png")
    paths["loop"].symlink_to(paths["loop"])
    os.mkfifo(paths["pipe"])
    paths["device"].symlink_to("/dev/zero")
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("read"))
    bad = images.find_bad_images(images.read_image, list(paths.values()))
    assert bad == list(paths.values())
    reasons = [
        f"its {1 << 40} bytes are more than {images.LARGEST_BYTES}",
        os.strerror(errno.ENOENT),
        os.strerror(errno.ELOOP),
        *["not a regular file"] * 2,
    ]
    rows = [
        (path, re.escape(f"({reason})") + ADVICE) for path, reason in zip(bad, reasons, strict=True)
    ]
    check_refusals(rows, images.read_image)


FORMATS = {
    "png": {}, "jpeg": {}, "progressive jpeg": {"progressive": True}, "gif": {}, "bmp": {},
    "tiff": {}, "lzw tiff": {"compression": "tiff_lzw"}, "webp": {}, "ppm": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_image_is_never_half_an_image(kind):
    content = noise(kind.split()[-1], **FORMATS[kind])
    whole = to_array(images.decode(content, "x"))
    for length in range(0, len(content), 13):
        try:
            pixels = to_array(images.decode(content[:length], "x"))
        except InputError:
            continue
        assert np.array_equal(pixels, whole)  # only padding was cut off


def test_too_many_open_files_is_not_the_fault_of_the_image(tmp_path, monkeypatch):
    (tmp_path / "x.png").touch()

    def fail(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Too many") as caught:
        images.find_bad_images(images.read_image, [tmp_path / "x.png"])
    assert not isinstance(caught.value, InputError)


def test_without_memory_an_image_is_named_and_not_taken_for_a_bad_one(tmp_path, monkeypatch):
    """It ended with a traceback, for MemoryError has no words; or with advice about batches."""

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(images.Image, "open", fail)
    path = tmp_path / "x.png"
    path.write_bytes(b"x")
    words = f"^{path}: memory ran out while it was read .MemoryError.; see whether it is as large"
    check_refusals([(lambda: images.find_bad_images(images.read_image, [path]), words)])


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_images_are_turned_as_exif_says_unless_asked_not_to(tmp_path, format):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    options = {"quality": 100, "lossless": True} if format == "WEBP" else {}
    for orientation in range(1, 9):
        image, exif = Image.fromarray(pixels), Image.Exif()
        exif[0x0112] = orientation
        image.save(tmp_path / f"{orientation}.x", format, exif=exif, **options)
        found = images.read_image(tmp_path / f"{orientation}.x")
        expected = ImageOps.exif_transpose(Image.open(tmp_path / f"{orientation}.x")).convert("RGB")
        upright = turned_upright(found)
        assert format != "TIFF" or upright is found  # Pillow has turned it
        assert np.array_equal(to_array(upright), to_array(expected))
        assert upright is turned_upright(upright)  # once
        assert turned_upright(images.in_channels(found, 1)).size == expected.size


def test_a_file_cannot_say_what_only_its_decoder_says(tmp_path):
    info = PngInfo()
    info.add_text("vigpipe orientation", "6")
    flat(RED).save(tmp_path / "1.png", pnginfo=info)
    found = images.read_image(tmp_path / "1.png")
    assert turned_upright(found) is found


def test_a_run_says_what_its_images_are_like(tmp_path):
    kinds = {"grey": flat(9, "L"), "colour": flat(RED), "clear": half_transparent()}
    kinds["cmyk"] = flat((1, 2, 3, 4), "CMYK")
    for split in ("train", "test"):
        for name, image in kinds.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            exif = Image.Exif()
            exif[0x0112] = 3
            options: dict[str, Any] = {"exif": exif} if name == "colour" else {}
            suffix = "png" if options else "tif"
            image.save(folder / f"1.{suffix}", **options)
    for turned, how in (
        (True, "all such are turned upright"),
        (False, "none is turned, as --no-e"),
    ):
        source = open_source(str(tmp_path), exif=turned)
        assert source.stored is not None
        kinds_told, turned_told = source.stored.notes
        assert kinds_told == (
            "of 4 train images looked at, 1 CMYK, 1 grey, 1 with transparent pixels: all are read "
            "as RGB, transparent pixels as white"
        )
        some = "of 4 train images looked at, 1 with an orientation in EXIF: "
        assert turned_told.startswith(some + how)
