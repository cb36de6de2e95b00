import errno
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vigpipe.data import images
from vigpipe.data.formats import folders
from vigpipe.data.picture import to_array
from vigpipe.errors import InputError
from vigpipe.files.names import is_plain

RED, GREEN = (250, 10, 20), (10, 200, 30)


def save(image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def png(path, size=(3, 2), colour=RED):
    """Write a real PNG; size is (width, height), as Pillow has it."""
    return save(Image.new("RGB", size, colour), path)


# --- what an image file shows ----------------------------------------------------------------


def half_transparent():
    image = Image.new("RGBA", (2, 1), (*RED, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))  # black, but not to be seen
    return image


def palette():
    return Image.fromarray(np.array([[RED, GREEN]], dtype=np.uint8)).convert(
        "P", palette=Image.Palette.ADAPTIVE
    )


def sixteen_bits():
    return Image.fromarray(np.array([[0x1234, 0xFFFF]], dtype=np.uint16))


WHITE, GREY = (255, 255, 255), (100, 100, 100)
GOOD_IMAGES = {
    "rgb.png": (lambda: Image.new("RGB", (2, 1), RED), {}, [RED, RED]),
    "grey.png": (lambda: Image.new("L", (2, 1), 100), {}, [GREY, GREY]),
    "one bit.png": (lambda: Image.new("1", (2, 1), 1), {}, [WHITE, WHITE]),
    "rgba.png": (half_transparent, {}, [RED, WHITE]),
    "grey alpha.png": (lambda: Image.new("LA", (2, 1), (0, 0)), {}, [WHITE, WHITE]),
    "palette.png": (palette, {}, [RED, GREEN]),
    "palette with a see-through red.png": (
        lambda: palette(),
        {"transparency": bytes([0])},
        None,  # which colour is entry 0 is up to Pillow: one of the two turns white
    ),
    "16 bits.png": (sixteen_bits, {}, [(0x12,) * 3, (0xFF,) * 3]),
    "16 bits.tiff": (sixteen_bits, {}, [(0x12,) * 3, (0xFF,) * 3]),
    "cmyk.jpg": (
        lambda: Image.new("CMYK", (2, 1), (0, 255, 255, 0)),
        {"quality": 100},
        [(255, 0, 0)] * 2,
    ),
    "animated.gif": (
        lambda: Image.new("RGB", (2, 1), RED),
        {"save_all": True, "append_images": [Image.new("RGB", (2, 1), GREEN)]},
        [RED, RED],
    ),
}


@pytest.mark.parametrize("name", GOOD_IMAGES)
def test_every_kind_of_image_becomes_rgb(tmp_path, name):
    make, options, expected = GOOD_IMAGES[name]
    path = save(make(), tmp_path / name, **options)
    pixels = to_array(images.read_image(path))
    assert pixels.shape == (1, 2, 3)
    assert pixels.dtype == np.uint8
    if expected is None:
        assert [tuple(p) for p in pixels[0]].count(WHITE) == 1
    else:
        np.testing.assert_allclose(pixels[0], expected, atol=2)  # jpeg and palettes round


def test_a_16_bit_pgm_keeps_its_upper_byte(tmp_path):
    path = tmp_path / "x.pgm"
    path.write_bytes(b"P5 2 1 65535\n" + bytes([0x12, 0x34, 0xFF, 0xFF]))
    assert to_array(images.read_image(path))[0].tolist() == [[0x12] * 3, [0xFF] * 3]


def test_a_png_under_the_name_of_a_jpeg_is_read(tmp_path):
    path = png(tmp_path / "x.png").rename(tmp_path / "x.JPEG")
    assert to_array(images.read_image(path))[0, 0].tolist() == list(RED)


# --- what cannot be read ---------------------------------------------------------------------


def noise_bytes(format):
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, format)
    return file.getvalue()


def bomb():
    """Return a PNG whose header promises 20,000 × 20,000 pixels."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


BAD_FILES = {
    "truncated.png": (lambda: noise_bytes("png")[:2000], "truncated"),
    "truncated.jpg": (lambda: noise_bytes("jpeg")[:600], "truncated"),
    "flipped bytes.png": (lambda: noise_bytes("png").replace(b"IDAT", b"iDAT"), ""),
    "zero.png": (lambda: b"", "the file is empty"),
    "text.png": (lambda: b"name,label\ncat,3\n", "not an image"),
    "postscript.png": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an"),
    "bomb.png": (bomb, "decompression bomb"),
}


def check_message(error, path, reason):
    assert str(path) in str(error)
    assert reason in str(error)
    assert "`--skip-bad-images`" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_its_reason_and_the_way_on(tmp_path, name):
    make, reason = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(make())
    with pytest.raises(InputError) as caught:
        images.read_image(path)
    check_message(caught.value, path, reason)
    assert list(images.find_bad_images(images.read_image, [path])) == [path]


def test_a_float_tiff_is_refused_as_its_range_is_unknown(tmp_path):
    path = save(Image.fromarray(np.ones((2, 2), dtype=np.float32)), tmp_path / "x.tiff")
    with pytest.raises(InputError, match="'F' have no known range"):
        images.read_image(path)


def test_links_to_nowhere_and_to_themselves_are_bad(tmp_path):
    nowhere, loop = tmp_path / "nowhere.png", tmp_path / "loop.png"
    nowhere.symlink_to(tmp_path / "missing.png")
    loop.symlink_to(loop)
    found = images.find_bad_images(images.read_image, [nowhere, loop])
    assert found == {
        nowhere: os.strerror(errno.ENOENT),
        loop: os.strerror(errno.ELOOP),
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads what it likes")
def test_a_file_without_permission_is_bad(tmp_path):
    path = png(tmp_path / "x.png")
    path.chmod(0)
    assert images.find_bad_images(images.read_image, [path]) == {path: os.strerror(errno.EACCES)}


def test_a_fifo_is_bad_and_does_not_wait_for_a_writer(tmp_path):
    path = tmp_path / "x.png"
    os.mkfifo(path)
    assert images.find_bad_images(images.read_image, [path]) == {path: "not a regular file"}


def test_too_many_open_files_is_not_the_fault_of_the_image(tmp_path, monkeypatch):
    path = png(tmp_path / "x.png")

    def fail(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Too many") as caught:
        images.find_bad_images(images.read_image, [path])
    assert not isinstance(caught.value, InputError)


def test_find_bad_images_keeps_the_order_however_the_work_is_shared(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(30)]
    for i, path in enumerate(paths):
        path.write_bytes(b"") if i % 7 == 3 else png(path)
    found = images.find_bad_images(images.read_image, paths)
    assert list(found) == paths[3::7]
    shares = [images.find_bad_images(images.read_image, paths[rank::4]) for rank in range(4)]
    assert {path: reason for share in shares for path, reason in share.items()} == found


@given(st.binary(max_size=200), st.sampled_from(["png", "jpeg", "gif", "bmp", "tiff", "webp"]))
def test_any_damage_to_a_file_is_an_input_error_or_none(tmp_path_factory, junk, format):
    """Decoders raise a dozen exception types; none other than InputError may come out."""
    data = noise_bytes(format)
    where = len(junk) * 7 % len(data)
    path = tmp_path_factory.mktemp("junk") / f"x.{format}"
    path.write_bytes(data[:where] + junk + data[where + len(junk) :])
    try:
        assert images.read_image(path).mode == "RGB"
    except InputError:
        assert list(images.find_bad_images(images.read_image, [path])) == [path]


# --- which files belong to a folder ----------------------------------------------------------


def test_images_are_listed_by_class_and_name_and_nothing_else(tmp_path):
    for name in ("dog/2.png", "dog/10.JPG", "cat/b.png", "cat/more/a.webp", ".hidden/x.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not opened")
    for name in ("dog/.x.png", "dog/notes.txt", "dog/png", "README.png"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "dog" / "x.png").mkdir()  # a folder, whatever it is called
    png(tmp_path / "dog" / "x.png" / "1.png")
    listed = folders.list_classes(tmp_path)
    assert list(listed) == ["cat", "dog"]
    assert listed["cat"] == [tmp_path / "cat/b.png", tmp_path / "cat/more/a.webp"]
    assert listed["dog"] == [tmp_path / "dog" / n for n in ("10.JPG", "2.png", "x.png/1.png")]


def test_linked_class_folders_are_followed_and_loops_are_not(tmp_path):
    png(tmp_path / "elsewhere" / "1.png")
    classes = tmp_path / "train"
    classes.mkdir()
    (classes / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path)
    # `up` leads to elsewhere/ and train/cat/ too, both already seen.
    assert folders.list_classes(classes) == {"cat": [classes / "cat" / "1.png"]}


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\nb", b"\x1b[2J", "\u202egnp".encode()])
def test_a_class_whose_name_cannot_be_kept_or_printed_is_refused(name, tmp_path):
    # The name goes into the weights file: the whole training ran, and then they were lost.
    png(tmp_path / "cat" / "a.png")
    png(tmp_path / os.fsdecode(name) / "b.png")
    with pytest.raises(InputError, match=r"the class folder .* has control characters") as caught:
        folders.list_classes(tmp_path)
    assert is_plain(str(caught.value))


def test_an_empty_class_and_a_folder_without_classes_are_errors(tmp_path):
    with pytest.raises(InputError, match="no class folders") as caught:
        folders.list_classes(tmp_path)
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("soon")
    with pytest.raises(InputError, match="class 'cat' has no images") as caught:
        folders.list_classes(tmp_path)
    assert str(tmp_path / "cat") in str(caught.value)


@pytest.mark.parametrize("present", [(), ("train",), ("test",), ("val",)])
def test_a_missing_split_folder_is_named(tmp_path, present):
    for name in present:
        (tmp_path / name).mkdir()
    missing = "test/ or val/" if present == ("train",) else "train/"
    with pytest.raises(InputError) as caught:
        folders.split_folders(tmp_path)
    assert f"{tmp_path}: has no folder {missing};" in str(caught.value)


def test_val_stands_in_for_test(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    assert folders.split_folders(tmp_path) == (tmp_path / "train", tmp_path / "val")
    (tmp_path / "test").mkdir()
    assert folders.split_folders(tmp_path)[1] == tmp_path / "test"
