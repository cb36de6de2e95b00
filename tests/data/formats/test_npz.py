import pickle
import subprocess
import sys
import zipfile
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.data.formats.small_sets import (
    LABELS,
    NAMES,
    check_images,
    keras_arrays,
    noise,
    write_npz,
)
from tests.files.test_npy import forged
from tests.refusals import check_refusals
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
    check_images(stored, *channels)
    assert stored.test.load.name_of(4) == f"{path}: x_test: image 4"
    load: Any = stored.train.load
    assert isinstance(load.pixels(), np.memmap) != save.keywords["packed"]
    pickled = pickle.dumps(load)
    assert noise("train", *channels)[0].tobytes() not in pickled
    np.testing.assert_array_equal(pickle.loads(pickled)(7), load(7))


def test_medmnist_names_are_known_and_its_validation_images_left_alone(save):
    arrays = {}
    for split, like in (("train", "train"), ("val", "test"), ("test", "test")):
        arrays[f"{split}_images"] = noise(like, 3)
        arrays[f"{split}_labels"] = LABELS[like][:, None].astype(np.uint8)
    stored = read(save(arrays))
    check_images(stored, 3)
    assert stored.notes == (f"{save.args[0]}: not read: val_images, val_labels",)


def test_class_names_are_taken_from_the_file(save):
    stored = read(save({**keras_arrays(), "class_names": np.array(NAMES)}))
    assert stored.class_names == tuple(NAMES)


TEXTS = {f"y_{split}": np.array(NAMES)[labels] for split, labels in LABELS.items()}


def test_labels_may_be_texts_which_are_the_names_of_the_classes(save):
    for changed in ({}, {name: texts.astype("S") for name, texts in TEXTS.items()}):
        stored = read(save({**keras_arrays(3), **TEXTS, **changed}))
        assert stored.class_names == tuple(NAMES)  # sorted
        check_images(stored, 3)
    turned = read(save({**keras_arrays(), **TEXTS, "class_names": np.array(NAMES[::-1])}))
    assert turned.class_names == tuple(NAMES[::-1])
    np.testing.assert_array_equal(turned.train.labels, 2 - LABELS["train"])


def test_many_labels_are_no_endless_list_of_members(tmp_path):
    """More than a MiB of them, not compressed, were called damage."""
    num = 140_000
    pixels, labels = np.zeros((num, 1, 1), np.uint8), np.arange(num) % 2
    arrays = {"x_train": pixels, "y_train": labels, "x_test": pixels, "y_test": labels}
    np.testing.assert_array_equal(read(write_npz(tmp_path / "x.npz", arrays)).test.labels, labels)


def test_labels_may_be_of_any_whole_type(save):
    for type_ in (np.uint8, ">i4"):
        arrays = {**keras_arrays(), "y_train": LABELS["train"].astype(type_)}
        np.testing.assert_array_equal(read(save(arrays)).train.labels, LABELS["train"])


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
    wide = keras_arrays(3) | {"y_train": np.array(["x"] * len(TRAIN), dtype="U100")}
    with pytest.raises(InputError, match="y_train has 4800 bytes, expected at most 1000"):
        read(write_npz(tmp_path / "wide.npz", wide))


# ---- what is refused ------------------------------------------------------------------------

COLOURS, TRAIN, TEST = noise("train", 3), LABELS["train"], LABELS["test"]
MEDMNIST = {f"{s}_images": noise(s) for s in LABELS} | {f"{s}_labels": LABELS[s] for s in LABELS}
ARRAYS = [
    ({"y_train": TRAIN.astype(object)}, "y_train holds Python objects"),
    ({"class_names": np.array(NAMES, dtype=object)}, r"dtype=str\)"),
    ({"x_train": np.asfortranarray(COLOURS)}, r"np\.ascontiguousarray\(x_train"),
    ({"x_train": COLOURS / 255}, r"float64, expected uint8 .*\(x_train \* 255\)"),
    (
        {"x_train": COLOURS.transpose(0, 3, 1, 2).copy()},
        r"x_train has the shape \(12, 3, 8, 8\), .*x_train\.transpose\(0, 2, 3, 1\)",
    ),
    ({"x_train": COLOURS.reshape(12, -1)}, r"has the shape \(12, 192\)"),
    ({"x_test": COLOURS[:0], "y_test": TEST[:0]}, "x_test: has no images"),
    ({"x_test": np.zeros((6, 1, 300, 3), np.uint8)}, "one side is at most 256 times"),
    ({"x_test": noise("test")}, "one is grey and one has colours"),
    ({"y_test": TEST[:-1]}, r"of shape \(5,\), expected .* \(6,\)"),
    ({"y_test": np.eye(3, dtype=int)[TEST]}, r"y_test\.argmax\(1\)"),
    ({"y_test": TEST / 1}, r"y_test has float64 .*; store y_test\.astype\(int\) if"),
    ({"y_test": TEXTS["y_test"]}, "one are texts and one are numbers; store both as texts"),
    ({**TEXTS, "y_test": np.array(["cow"] * 6)}, "test image 0 has the label 'cow', .* 3 classes"),
    ({**TEXTS, "class_names": np.array(["cat"])}, "train image 1 has the label 'dog'"),
    ({**TEXTS, "y_train": np.array([b"a\xff"] * 12)}, r"class 0, 'a\\xff', is .* rename"),
    ({"y_test": TEST - 1}, "test image 0 has the label -1"),
    ({"y_test": TEST + 1}, "test image 2 has the label 3"),
    ({"y_train": TRAIN * 2}, "no train image has label 1"),
    ({"class_names": np.array([], dtype=str)}, "its list of class names is empty"),
    ({"class_names": np.arange(3)}, "expected one text for each class"),
    ({"class_names": np.array(["a", "b", "a"])}, "two classes are called 'a'"),
    ({"class_names": np.array(["a", "b\n", "c"])}, "control characters"),
    ({"x_train": None, "X": COLOURS}, "has the arrays X, x_test, y_test, y_train,"),
    (MEDMNIST, "has both x_train, y_train, x_test, y_test or train_images"),
]


def test_arrays_that_do_not_fit_are_told_in_one_sentence(tmp_path):
    def read_with(changed):
        arrays = {**keras_arrays(3), **changed}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        read(write_npz(tmp_path / "x.npz", arrays))

    check_refusals(ARRAYS, read_with)


def test_pixels_other_than_their_header_says_are_refused_before_they_take_memory(tmp_path):
    arrays = keras_arrays(3)
    del arrays["x_train"]

    def read_forged(*forgery):
        path = write_npz(tmp_path / "x.npz", arrays)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("x_train.npy", forged(*forgery))
        read(path)

    rows = [
        ("|u1", (60_000_000, 28, 28), bytes(1 << 16), "npy has .* but its header says"),
        ("|u1", (-1, -8, 8), bytes(64), "header says"),
        ("|V0", (12,), r"x_train has numbers of type \|V0"),
    ]
    check_refusals(rows, read_forged)  # tests/files/test_npy.py has more headers


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
