import io
import pickle
import struct
import subprocess
import sys
import zipfile
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.data.formats.small_sets import LABELS, NAMES, keras_arrays, noise, write_npz
from vigpipe.data.formats import npz
from vigpipe.data.formats.npz import holds, read
from vigpipe.data.picture import to_array
from vigpipe.errors import InputError
from vigpipe.files import npy as numpy_files


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def save(request, tmp_path):
    """Writes arrays to a .npz file and returns its path."""
    return partial(write_npz, tmp_path / "x.npz", packed=request.param)


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
def test_pixels_and_labels_are_those_of_keras_arrays(save, channels):
    path = save(keras_arrays(*channels))
    stored = read(path)
    assert holds(path)
    assert stored.class_names == ("0", "1", "2")
    grey = channels != (3,)
    assert (stored.look.channels, stored.look.flip) == (1 if grey else 3, not grey)
    assert not stored.look.is_encoded
    for split, images in stored.splits.items():
        np.testing.assert_array_equal(images.labels, LABELS[split])
        loaded = np.stack([to_array(images.load(i)) for i in range(len(images))])
        np.testing.assert_array_equal(loaded, noise(split, *channels).reshape(loaded.shape))
    assert stored.test.load.name_of(4) == f"{path}: x_test: image 4"


def test_medmnist_names_are_known_and_its_validation_images_left_alone(save):
    arrays = {
        f"{split}_{name}": array
        for split in ("train", "val", "test")
        for name, array in (
            ("images", noise(split if split != "val" else "test", 3)),
            ("labels", LABELS[split if split != "val" else "test"][:, None].astype(np.uint8)),
        )
    }
    stored = read(save(arrays))
    assert [len(images) for images in stored.splits.values()] == [12, 6]
    np.testing.assert_array_equal(stored.train.labels, LABELS["train"])


def test_class_names_are_taken_from_the_file(save):
    assert read(save({**keras_arrays(), "class_names": np.array(NAMES)})).class_names == tuple(
        NAMES
    )
    for label_type in (np.uint8, ">i4"):
        arrays = {**keras_arrays(), "y_train": LABELS["train"].astype(label_type)}
        np.testing.assert_array_equal(read(save(arrays)).train.labels, LABELS["train"])


def test_plain_arrays_are_mapped_and_pickles_hold_no_pixels(tmp_path):
    for packed in (False, True):
        path = write_npz(tmp_path / f"{packed}.npz", keras_arrays(3), packed)
        load: Any = read(path).train.load
        assert isinstance(load.pixels(), np.memmap) != packed
        pickled = pickle.dumps(load)
        assert noise("train", 3)[0].tobytes() not in pickled
        np.testing.assert_array_equal(pickle.loads(pickled)(7), load(7))


def test_a_refused_compressed_file_becomes_a_mapped_one_as_the_message_says(tmp_path, monkeypatch):
    write_npz(tmp_path / "old.npz", keras_arrays(3), packed=True)
    monkeypatch.setattr(npz, "MOST_UNPACKED", 1000)
    with pytest.raises(InputError, match="at most 1000 are unpacked into memory") as caught:
        read(tmp_path / "old.npz")
    command = str(caught.value).partition("without compression, ")[2].partition(", and it")[0]
    code = "import numpy as np\n" + command
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    loaded = to_array(read(tmp_path / "new.npz").train.load(3))
    assert loaded.tolist() == noise("train", 3)[3].tolist()


# ---- what is refused ------------------------------------------------------------------------

COLOURS = noise("train", 3)
ARRAYS = {
    "objects": ({"y_train": LABELS["train"].astype(object)}, "y_train holds Python objects"),
    "names as objects": ({"class_names": np.array(NAMES, dtype=object)}, r"dtype=str\)"),
    "columns first": ({"x_train": np.asfortranarray(COLOURS)}, r"np\.ascontiguousarray\(x_train"),
    "fractions": ({"x_train": COLOURS / 255}, r"float64, expected uint8 .*\(x_train \* 255\)"),
    "channels first": (
        {"x_train": COLOURS.transpose(0, 3, 1, 2).copy()},
        r"x_train has the shape \(12, 3, 8, 8\), .*x_train\.transpose\(0, 2, 3, 1\)",
    ),
    "flat images": ({"x_train": COLOURS.reshape(12, -1)}, r"has the shape \(12, 192\)"),
    "four channels": ({"x_train": np.zeros((12, 8, 8, 4), np.uint8)}, r"\(n, h, w, 3\)"),
    "no images": ({"x_test": COLOURS[:0], "y_test": LABELS["test"][:0]}, "x_test: has no images"),
    "a thread": ({"x_test": np.zeros((6, 1, 300, 3), np.uint8)}, "one side is at most 256 times"),
    "one grey": ({"x_test": noise("test")}, "one is grey and one has colours"),
    "too few labels": ({"y_test": LABELS["test"][:-1]}, r"of shape \(5,\), expected .* \(6,\)"),
    "rows of ones": ({"y_test": np.eye(3)[LABELS["test"]]}, r"y_test\.argmax\(1\)"),
    "fractional labels": ({"y_test": LABELS["test"] / 1}, "y_test has float64"),
    "a label below 0": ({"y_test": LABELS["test"] - 1}, "test image 0 has the label -1"),
    "an unknown class": ({"y_test": LABELS["test"] + 1}, "test image 2 has the label 3"),
    "a label left out": ({"y_train": LABELS["train"] * 2}, "no train image has label 1"),
    "names of no class": (
        {"class_names": np.array([], dtype=str)},
        "its list of class names is empty",
    ),
    "numbers for names": ({"class_names": np.arange(3)}, "expected one text for each class"),
    "a name twice": ({"class_names": np.array(["a", "b", "a"])}, "two classes are called 'a'"),
    "a name that forges": ({"class_names": np.array(["a", "b\n", "c"])}, "control characters"),
    "other names": ({"x_train": None, "X": COLOURS}, "has the arrays X, x_test, y_test, y_train,"),
    "both namings": (
        {f"{s}_{n}": a for s in LABELS for n, a in (("images", noise(s)), ("labels", LABELS[s]))},
        "has both x_train, y_train, x_test, y_test or train_images",
    ),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_do_not_fit_are_told_in_one_sentence(tmp_path, case):
    changed, message = ARRAYS[case]
    arrays = {**keras_arrays(3), **changed}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    write_npz(tmp_path / "x.npz", arrays)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path / "x.npz")
    assert str(caught.value).isprintable()


def zipped(compression=zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    """Keras' arrays, of which some are other bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, array in keras_arrays(3).items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", members.get(name, content.getvalue()))
    return file.getvalue()


def npy(header: str, content: bytes = b"", version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + content


def header(shape: str, descr: str = "'|u1'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


WHOLE = zipped(zipfile.ZIP_STORED)
BYTES = {
    "empty": (b"", "File is not a zip file"),
    "a page": (b"<html>404 Not Found</html>", "File is not a zip file"),
    "cut off": (WHOLE[:-100], "damaged or not wholly downloaded"),
    "a list of members without end": (
        WHOLE[:-10] + struct.pack("<I", 1 << 30) + WHOLE[-6:],
        "damaged or not wholly downloaded",
    ),
    "more pixels by the header": (
        zipped(x_train=npy(header("(60000000, 28, 28)"), bytes(1 << 16))),
        "x_train.npy has .* bytes, but its header says",
    ),
    "more rows than numbers": (zipped(x_train=npy(header(f"({'9' * 40}, 1, 1)"))), "header says"),
    "a negative shape": (zipped(x_train=npy(header("(-1, -8, 8)"), bytes(64))), "header says"),
    "a shape of words": (zipped(x_train=npy(header("('a',)"))), "does not begin as NumPy's do"),
    "a type that is none": (zipped(x_train=npy(header("(1,)", "'boo'"))), "does not begin as"),
    "numbers of no bytes": (zipped(y_train=npy(header("(12,)", "'|V0'"))), r"y_train has \|V0"),
    "a header without end": (
        zipped(x_train=npy("", b"", 2)[:8] + b"\xff" * 99),
        "does not begin as",
    ),
    "a header of signs": (zipped(x_train=npy("-" * 9000 + "1")), "does not begin as"),
    "a header that calls": (zipped(x_train=npy("__import__('os').abort()")), "does not begin as"),
    "an unknown version": (zipped(x_train=npy(header("(1,)"), b"", 3)), "does not begin as"),
    "no array": (zipped(x_train=b"GIF89a"), "does not begin as"),
    "another compression": (zipped(zipfile.ZIP_BZIP2), "a way that NumPy does not use"),
    "damaged numbers": (
        (packed := zipped())[: packed.index(b"y_train") + 9] + bytes(60) + packed[-900:],
        "cannot be read as a .npz file",
    ),
}


@pytest.mark.parametrize("case", BYTES)
def test_damaged_and_hostile_files_are_told_in_one_sentence(tmp_path, case):
    content, message = BYTES[case]
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path / "x.npz")
    assert str(caught.value).isprintable()


def test_a_long_list_of_members_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(numpy_files, "_MOST_DIRECTORY_BYTES", 1 << 12)
    many = {f"a{i}": np.zeros(1) for i in range(100)}
    write_npz(tmp_path / "x.npz", keras_arrays() | many)
    with pytest.raises(InputError, match="as for a list of members"):
        read(tmp_path / "x.npz")


def test_damaged_pixels_of_a_compressed_file_are_found_at_the_start(tmp_path):
    path = write_npz(tmp_path / "x.npz", keras_arrays(3), packed=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"x_train.npy") + 1000] ^= 1  # noise is stored as it is within deflate
    path.write_bytes(content)
    with pytest.raises(InputError, match="Bad CRC-32 for file 'x_train"):
        read(path)


def test_the_same_name_twice_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(WHOLE)
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive, pytest.warns(match="Dupl"):
        archive.writestr("x_train.npy", b"")
    with pytest.raises(InputError, match="has two arrays x_train"):
        read(tmp_path / "x.npz")


def test_a_folder_called_npz_is_refused(tmp_path):
    (tmp_path / "x.npz").mkdir()
    with pytest.raises(InputError, match="is not a regular file"):
        read(tmp_path / "x.npz")
