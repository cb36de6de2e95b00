import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.formats.small_sets import LABELS, idx, noise, write_idx
from tests.debian import need_package
from vigpipe.data import open_source
from vigpipe.data.formats.idx import holds, read
from vigpipe.data.picture import to_array
from vigpipe.errors import InputError

FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
def test_pixels_and_labels_are_those_of_the_files(tmp_path, dot, packed):
    stored = read(write_idx(tmp_path, dot, packed))
    assert holds(tmp_path)
    assert stored.class_names == ("0", "1", "2")
    assert (stored.look.channels, stored.look.flip, stored.look.is_encoded) == (1, False, False)
    for split, images in stored.splits.items():
        assert images.labels.dtype == np.int64
        np.testing.assert_array_equal(images.labels, LABELS[split])
        loaded = np.stack([to_array(images.load(i)) for i in range(len(images))])
        np.testing.assert_array_equal(loaded, noise(split)[..., None])
    assert stored.test.load.name_of(4).endswith(f"ubyte{'.gz' * packed}: image 4")


def test_torchvision_reads_the_same_pixels_from_the_same_files(tmp_path):
    from torchvision.datasets import MNIST

    folder = write_idx(tmp_path / "MNIST" / "raw")
    theirs = MNIST(tmp_path, train=True)
    ours = read(folder).train
    assert len(theirs) == len(ours)
    for i in range(len(theirs)):
        image, label = theirs[i]
        np.testing.assert_array_equal(np.asarray(image), to_array(ours.load(i))[..., 0])
        assert label == ours.labels[i]


def test_plain_files_are_mapped_and_pickles_hold_no_pixels(tmp_path):
    for packed in (False, True):
        load: Any = read(write_idx(tmp_path / str(packed), packed=packed)).train.load
        assert isinstance(load.pixels(), np.memmap) != packed
        pickled = pickle.dumps(load)
        assert noise("train")[0].tobytes() not in pickled
        np.testing.assert_array_equal(pickle.loads(pickled)(7), load(7))


def test_an_image_that_is_loaded_may_be_written_to(tmp_path):
    load = read(write_idx(tmp_path)).train.load
    to_array(load(0))[:] = 0
    assert to_array(load(0)).any()


def test_classes_are_called_by_the_file_of_their_names(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "classes.txt").write_text("cat\ndog\nemu\nfox\n")
    assert read(tmp_path).class_names == ("cat", "dog", "emu", "fox")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(InputError, match="has the label 2, but with 2 classes labels are 0 … 1"):
        read(tmp_path)


def packed_behind(shape: tuple[int, ...], content: bytes) -> bytes:
    return gzip.compress(struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + content)


IMAGES, TEST_LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
WHOLE = idx(noise("train"))
HOSTILE = {
    "missing": (TEST_LABELS, None, r"has no file t10k-labels-idx1-ubyte or .*\.gz"),
    "empty": (IMAGES, b"", "ends within its header of 16 bytes"),
    "labels for images": (IMAGES, idx(LABELS["train"]), "begins with the bytes 00000801, expected"),
    "a page": (IMAGES, b"<html>404 Not Found</html>", "begins with the bytes 3c68746d"),
    "cut off": (IMAGES, WHOLE[:-1], r"has 767 bytes behind its header, expected 768 \(12×8×8\)"),
    "too long": (IMAGES, WHOLE + b"0", "has 769 bytes behind its header"),
    "no images": (IMAGES, idx(noise("train")[:0]), "has no images"),
    "fewer labels": (TEST_LABELS, idx(LABELS["test"][:-1]), "has 5 labels, but t10k.* 6 images"),
    "an unknown class": (TEST_LABELS, idx(LABELS["test"] + 1), "test image 2 has the label 3"),
    "a label left out": ("train-labels-idx1-ubyte", idx(LABELS["train"] * 2), "has label 1"),
    "sides of nothing": (IMAGES, idx(np.zeros((12, 0, 8))), "have 8×0 pixels"),
    "a thread": (IMAGES, idx(np.zeros((12, 1, 300))), "one side is at most 256 times the other"),
    "gz cut off": (f"{IMAGES}.gz", gzip.compress(WHOLE)[:-30], "not wholly downloaded"),
    "gz with fewer pixels": (f"{IMAGES}.gz", gzip.compress(WHOLE[:-9]), "9 of 768 bytes"),
    "gz with more pixels": (f"{IMAGES}.gz", gzip.compress(WHOLE + b"0"), "more bytes than pixels"),
    "gz that is none": (f"{IMAGES}.gz", WHOLE, "Not a gzipped file"),
    "gz with damage": (f"{IMAGES}.gz", gzip.compress(WHOLE)[:-8] + bytes(8), "CRC check failed"),
    "a bomb": (
        f"{IMAGES}.gz",
        packed_behind((60_000_000, 28, 28), bytes(1 << 20)),
        "says that it holds 47040000000 bytes, at most 2147483648 .* gunzip",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_wrong_is_told_in_one_sentence(tmp_path, case):
    name, content, message = HOSTILE[case]
    write_idx(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path)
    assert str(caught.value).isprintable()


def test_a_file_that_changes_while_it_is_in_use_is_an_error_of_one_sentence(tmp_path):
    pickled = pickle.dumps(read(write_idx(tmp_path)).train.load)
    (tmp_path / IMAGES).write_bytes(WHOLE[:-64])
    with pytest.raises(InputError, match="cannot be mapped into memory"):
        pickle.loads(pickled)(0)
    (tmp_path / IMAGES).write_bytes(idx(noise("test")))
    with pytest.raises(InputError, match="has changed while it was in use"):
        pickle.loads(pickled)(0)


def test_the_real_fashion_mnist_of_debian():
    need_package("dataset-fashion-mnist", FASHION.is_dir)
    source = open_source(str(FASHION))
    assert (len(source.train), len(source.test)) == (60_000, 10_000)
    assert (source.channels, source.image_size, source.num_classes) == (1, (28, 28), 10)
    assert np.bincount(source.train.labels).tolist() == [6000] * 10
    # Fashion-MNIST as a whole has mean 0.2860 and standard deviation 0.3530.
    x = source.train.read(range(0, 60_000, 20))
    assert abs(x.mean().item() - 0.286) < 0.01
    assert abs(x.std().item() - 0.353) < 0.01
    with gzip.open(FASHION / "t10k-images-idx3-ubyte.gz") as file:
        last = np.frombuffer(file.read(), np.uint8)[-784:]
    np.testing.assert_array_equal(source.test.read([9999]).numpy().ravel(), last / np.float32(255))
