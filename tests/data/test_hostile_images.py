"""Images from strangers: each is read as defined, or is bad with its name, and none costs much."""

import io
import os
import shutil
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vigpipe.data import images, open_source
from vigpipe.data.formats import folders
from vigpipe.data.picture import to_array
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


# --- what is read, and as what ---------------------------------------------------------------

DARK, WHITE = [0x12] * 3, [0xFF] * 3
READ = {
    "16-bit colours.png": (
        png(2, 1, 16, 2, b"\0" + struct.pack(">6H", 0x1234, 0xFFFF, 0x8000, 0, 0xFF, 0x100)),
        [[0x12, 0xFF, 0x80], [0, 0, 1]],
    ),
    "16-bit grey with alpha.png": (
        png(2, 1, 16, 4, b"\0" + struct.pack(">4H", 0x1234, 0xFFFF, 0x1234, 0)),
        [DARK, WHITE],
    ),
    "16-bit grey.tiff": (tiff(16, 1, b"\x34\x12\xff\xff"), [DARK, WHITE]),
    "16-bit grey, white is 0.tiff": (tiff(16, 0, b"\xcb\xed\0\0"), [DARK, WHITE]),
    "12-bit grey.tiff": (tiff(12, 1, b"\x12\x3f\xff"), [DARK, WHITE]),
    "grey up to 1000.pgm": (b"P5 2 1 1000\n" + struct.pack(">2H", 71, 1000), [DARK, WHITE]),
    "cmyk.tiff": (saved(flat((0, 255, 255, 0), "CMYK"), "tiff"), [[255, 0, 0]] * 2),
    "animated.png": (animated("png"), [RED] * 2),
    "animated.webp": (animated("webp", lossless=True), [RED] * 2),
    "two pages.tiff": (animated("tiff"), [RED] * 2),
    "a jpeg.png": (saved(flat(GREEN), "jpeg", quality=100), [GREEN] * 2),
    "a gif.jpg": (saved(flat(GREEN), "gif"), [GREEN] * 2),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_odd_but_whole_is_read_by_its_content(tmp_path, name):
    content, expected = READ[name]
    path = tmp_path / name
    path.write_bytes(content)
    row = to_array(images.read_image(path))[0]
    np.testing.assert_allclose(row, expected, atol=2)  # jpeg rounds
    assert images.find_bad_images(images.read_image, [path]) == {}


# --- what is refused -------------------------------------------------------------------------

REFUSED = {
    "empty.png": (b"", "the file is empty"),
    "notes.png": (b"cat: 3, dog: 5\n", "not an image"),
    "page.jpg": (b"<html><body>404 Not Found</body></html>", "not an image"),
    "drawing.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "clear 16-bit grey.png": (
        png(1, 1, 16, 0, b"\0\0\0", chunk(b"tRNS", b"\0\0")),
        "a transparent colour of 16 bits",
    ),
    "clear 16-bit colour.png": (
        png(1, 1, 16, 2, bytes(7), chunk(b"tRNS", b"\x12\x34\0\0\0\0")),
        "a transparent colour of 16 bits",
    ),
    "32-bit grey.tiff": (tiff(32, 1, bytes(8)), "have no known range"),
    "no size.gif": (b"GIF89a" + bytes(7) + b"," + bytes(9) + b"\x02\x00;", ""),
    "thread.png": (png(60_000, 1, 8, 0, bytes(60_001)), "60000×1 pixels, where one side"),
    "bomb that Pillow warns of.png": (png(9_500, 9_500, 1, 0, b""), "decompression bomb"),
    "bomb.png": (png(65_500, 65_500, 8, 2, b""), "decompression bomb"),
    "bomb.gif": (b"GIF89a" + b"\xff" * 4 + bytes(3) + b"," + bytes(9) + b"\x02\x00;", "bomb"),
    "bomb in its text.png": (
        png(1, 1, 8, 0, bytes(2), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 22)))),
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_found_and_named(tmp_path, name):
    content, reason = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert_is_bad(path, reason)


def assert_is_bad(path, reason):
    with pytest.raises(InputError) as caught:
        images.read_image(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be read as an image (")
    assert reason in message
    assert message.endswith("leave unreadable images out with `--skip-bad-images`")
    assert message.isprintable()
    found = images.find_bad_images(images.read_image, [path])
    assert list(found) == [path]
    assert reason in found[path]


def test_a_file_too_large_for_an_image_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "disk.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("read"))
    assert_is_bad(path, f"its {1 << 40} bytes are more than")


def test_a_device_is_not_read(tmp_path):
    path = tmp_path / "zero.png"
    path.symlink_to("/dev/zero")
    assert_is_bad(path, "not a regular file")


FORMATS = {
    "png": {}, "jpeg": {}, "progressive jpeg": {"progressive": True}, "gif": {}, "bmp": {},
    "tiff": {}, "lzw tiff": {"compression": "tiff_lzw"}, "webp": {}, "ppm": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_image_is_never_half_an_image(tmp_path, kind):
    content = noise(kind.split()[-1], **FORMATS[kind])
    path = tmp_path / "x.png"
    path.write_bytes(content)
    whole = to_array(images.read_image(path))
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        try:
            pixels = to_array(images.read_image(path))
            assert np.array_equal(pixels, whole)  # only padding was cut off
        except InputError:
            assert list(images.find_bad_images(images.read_image, [path])) == [path]


# --- folders ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            path = tmp_path / split / name / "1.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(saved(flat(RED), "png"))
    return tmp_path


def test_bad_images_are_left_out_and_counted(folder):
    for name, (content, _) in REFUSED.items():
        (folder / "train" / "cat" / name).write_bytes(content)
    (folder / "train" / "cat" / "0.png").symlink_to("nowhere.png")
    os.mkfifo(folder / "train" / "cat" / "pipe.png")
    (folder / "train" / "cat" / "folder.png").mkdir()  # a folder, and an empty one
    source = open_source(str(folder), skip_bad_images=True)
    assert source.num_bad_images == len(REFUSED) + 2
    assert source.train.labels.tolist() == [0, 1]
    assert source.train.read([0, 1]).shape == (2, 3, 1, 2)


@pytest.mark.parametrize("target", [".", "..", "../..", "../../.."])
def test_a_link_back_does_not_make_dogs_of_cats(folder, target):
    """`train/cat/up -> ..` held all of train: its dogs were listed, and labelled, as cats."""
    (folder / "train" / "cat" / "up").symlink_to(target)
    assert open_source(str(folder)).train.labels.tolist() == [0, 1]


def test_a_link_back_in_a_class_kept_elsewhere_does_not_either(folder):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("cat", "dog"):
        (folder / "train" / name).rename(elsewhere / name)
        (folder / "train" / name).symlink_to(elsewhere / name)
    (elsewhere / "cat" / "up").symlink_to(elsewhere)
    (elsewhere / "dog" / "train").symlink_to(folder / "train")
    assert open_source(str(folder)).train.labels.tolist() == [0, 1]


def test_a_class_whose_link_leads_nowhere_is_not_left_out_in_silence(folder):
    """It was: ten classes became nine, and the labels behind it moved up."""
    for split in ("train", "test"):
        (folder / split / "cow").symlink_to(folder / "unmounted" / "cow")
    with pytest.raises(InputError, match=r"train/cow: is a link that leads nowhere"):
        open_source(str(folder))


def test_folders_deeper_than_python_recurses_are_listed(tmp_path):
    """Symptom: RecursionError."""
    deeper = [tmp_path]
    for _ in range(1200):
        deeper.append(deeper[-1] / "a")
        deeper[-1].mkdir()
    image = deeper[-1] / "1.png"
    image.touch()
    assert folders.list_classes(tmp_path) == {"a": [image]}
    image.unlink()
    for folder in reversed(deeper[1:]):  # pytest's own tidying recurses
        folder.rmdir()


def test_a_folder_that_cannot_be_is_told_in_one_sentence():
    for name in ("~no-such-user/pictures", "a" * 300, "nul\0"):
        with pytest.raises(InputError, match="no such data"):
            open_source(name)


# --- permissions -----------------------------------------------------------------------------


@pytest.fixture
def as_nobody():
    """A folder that everybody may enter; root reads everything, so be nobody while in the test."""
    root = Path(tempfile.mkdtemp(prefix="vigpipe-"))
    root.chmod(0o755)
    user = os.geteuid()
    yield root, (lambda: os.seteuid(65534) if user == 0 else None)
    os.seteuid(user)
    for path in root.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(root)


def test_an_image_without_permission_is_bad(as_nobody):
    root, become_nobody = as_nobody
    good, bad = root / "good.png", root / "bad.png"
    for path, mode in ((good, 0o644), (bad, 0)):
        path.write_bytes(saved(flat(RED), "png"))
        path.chmod(mode)
    become_nobody()
    assert_is_bad(bad, "Permission denied")
    assert images.find_bad_images(images.read_image, [good, bad]) == {bad: "Permission denied"}


@pytest.mark.parametrize("mode", [0, 0o444])  # names may be listed, but nothing be opened
@pytest.mark.parametrize("closed", [".", "train", "train/cat", "train/cat/more"])
def test_a_folder_without_permission_is_one_sentence(as_nobody, closed, mode):
    root, become_nobody = as_nobody
    for name in ("train/cat/more", "test/cat"):
        (root / name).mkdir(parents=True)
        (root / name / "1.png").write_bytes(saved(flat(RED), "png"))
    (root / closed).chmod(mode)
    become_nobody()
    with pytest.raises(InputError) as caught:
        open_source(str(root), skip_bad_images=True)
    assert str(root / closed) in str(caught.value)
