import gzip
import pickle
import struct
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from tests.data.formats.small_sets import LABELS, check_images, idx, noise, write_idx
from tests.refusals import check_refusals
from vigpipe.data.formats.idx import holds, read
from vigpipe.data.picture import to_array
from vigpipe.errors import InputError


@pytest.mark.parametrize(("dot", "packed"), [("-", False), (".", True)])
def test_pixels_and_labels_are_those_of_the_files(tmp_path, dot, packed):
    stored = read(write_idx(tmp_path, dot, packed))
    assert holds(tmp_path)
    assert stored.class_names == ("0", "1", "2")
    assert (stored.look.channels, stored.look.flip, stored.look.is_encoded) == (1, False, False)
    check_images(stored)
    load: Any = stored.train.load
    assert stored.test.load.name_of(4).endswith(f"ubyte{'.gz' * packed}: image 4")
    assert isinstance(load.pixels(), np.memmap) != packed
    pickled = pickle.dumps(load)
    assert noise("train")[0].tobytes() not in pickled
    np.testing.assert_array_equal(pickle.loads(pickled)(7), load(7))
    to_array(load(0))[:] = 0  # a copy, which may be written to
    assert to_array(load(0)).any()


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


def test_classes_are_called_by_the_file_of_their_names(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "classes.txt").write_text("cat\ndog\nemu\nfox\n")
    assert read(tmp_path).class_names == ("cat", "dog", "emu", "fox")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(InputError, match="has the label 2, but with 2 classes labels are 0 … 1"):
        read(tmp_path)


IMAGES, TEST_LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
WHOLE = idx(noise("train"))
BOMB = gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 60_000_000, 28, 28) + bytes(1 << 20))
MANY = gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 1 << 27, 1, 1))  # one class, of zeros
REFUSED = [
    (TEST_LABELS, None, r"has no file t10k-labels-idx1-ubyte or .*\.gz"),
    (IMAGES, b"", "ends within its header of 16 bytes"),
    (IMAGES, idx(LABELS["train"]), "begins with the bytes 00000801, expected"),
    (IMAGES, WHOLE[:-1], r"has 767 bytes behind its header, expected 768 \(12×8×8\)"),
    (IMAGES, idx(noise("train")[:0]), "has no images"),
    (TEST_LABELS, idx(LABELS["test"][:-1]), "has 5 labels, but t10k.* 6 images"),
    (TEST_LABELS, idx(LABELS["test"] + 1), "test image 2 has the label 3"),
    ("train-labels-idx1-ubyte", idx(LABELS["train"] * 2), "has label 1"),  # none has
    (IMAGES, idx(np.zeros((12, 0, 8))), "have 8×0 pixels"),
    (IMAGES, idx(np.zeros((12, 1, 300))), "one side is at most 256 times the other"),
    (f"{IMAGES}.gz", gzip.compress(WHOLE)[:-30], "not wholly downloaded"),
    (f"{IMAGES}.gz", gzip.compress(WHOLE[:-9]), "9 of 768 bytes"),
    (f"{IMAGES}.gz", gzip.compress(WHOLE + b"0"), "more bytes than pixels"),
    (f"{IMAGES}.gz", gzip.compress(WHOLE)[:-8] + bytes(8), "CRC check failed"),
    (f"{IMAGES}.gz", BOMB, "says that it holds 47040000000 bytes, at most 2147483648 .* gunzip"),
    (f"{IMAGES}.gz", MANY, "has 134217728 images, expected at most 67108864"),
]


def test_what_is_wrong_is_told_in_one_sentence(tmp_path):
    def read_with(name, content):
        root = write_idx(Path(mkdtemp(dir=tmp_path)))
        (root / name.removesuffix(".gz")).unlink()
        if content is not None:
            (root / name).write_bytes(content)
        read(root)

    check_refusals(REFUSED, read_with)


def test_a_file_that_changes_while_it_is_in_use_is_an_error_of_one_sentence(tmp_path):
    pickled = pickle.dumps(read(write_idx(tmp_path)).train.load)
    (tmp_path / IMAGES).write_bytes(WHOLE[:-64])
    with pytest.raises(InputError, match="cannot be mapped into memory"):
        pickle.loads(pickled)(0)
    (tmp_path / IMAGES).write_bytes(idx(noise("test")))
    with pytest.raises(InputError, match="has changed while it was in use"):
        pickle.loads(pickled)(0)
