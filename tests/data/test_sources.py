import hashlib
import pickle
import random
import shutil
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.tars.writing import png
from tests.data.test_augment import states
from tests.refusals import check_refusals
from tests.test_cli import make_pictures
from vigpipe.data import images, open_source, sources, split, transforms
from vigpipe.data.formats import folders
from vigpipe.data.picture import to_array
from vigpipe.errors import InputError, UnreadableImage


@pytest.fixture
def folder(tmp_path):
    return make_pictures(tmp_path / "pictures")


# --- digits ----------------------------------------------------------------------------------


def test_digits_are_the_ones_of_scikit_learn_in_0_to_1():
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    source = open_source("digits")
    assert (source.num_classes, source.channels, source.image_size) == (10, 1, (8, 8))
    assert (len(source.train), len(source.test)) == (1437, 360)
    parts = [s.read(range(len(s))) for s in (source.train, source.test)]
    assert parts[0].shape == (1437, 1, 8, 8)
    assert parts[0].dtype == torch.float32
    read = {(t.numpy().tobytes()) for part in parts for t in part}
    original = {(i / 16).astype(np.float32).tobytes() for i in digits.images}
    assert read == original
    labels = np.concatenate([source.train.labels, source.test.labels])
    assert np.bincount(labels).tolist() == np.bincount(digits.target).tolist()
    assert source.test.labels.dtype == np.int64


def test_digits_without_their_file_are_one_sentence(monkeypatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    words = r"digits\.csv\.gz: the digits cannot be read .*scikit-learn"
    check_refusals([("digits", words)], open_source)


def test_digits_are_split_the_same_way_for_ever_and_every_class_by_a_fifth():
    test = open_source("digits", seed=7).test
    assert set(np.bincount(test.labels)) <= {35, 36, 37}
    # Written down once: a change would make old accuracies incomparable.
    digest = hashlib.sha256(test.read(range(360)).numpy().tobytes()).hexdigest()
    assert digest[:16] == "9a634ff4bc1bf69c"


def test_augmented_digits_are_not_mirrored_and_stay_in_0_to_1():
    x = open_source("digits", augment=True, image_size=16).train.read(range(60))
    assert x.shape == (60, 1, 16, 16)
    plain = (open_source("digits").train.read(range(60)) * 240).round().to(torch.uint8)
    for i, pixels in enumerate(plain.permute(0, 2, 3, 1).numpy()):
        generator = random.Random(transforms.image_seed(0, 0, i))
        crop = transforms.random_crop(pixels, (16, 16), generator, flip=False)
        expected = torch.tensor(to_array(crop)).permute(2, 0, 1) / 240
        torch.testing.assert_close(x[i], expected.clamp(max=1))


# --- CIFAR-10 --------------------------------------------------------------------------------


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Write ten train images and two test images in CIFAR-10's own format, and their checksums."""
    from torchvision.datasets import CIFAR10

    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    names = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

    def write(name, content):
        path = tmp_path / CIFAR10.base_folder / name
        path.parent.mkdir(exist_ok=True)
        # The real files are pickles of Python 2 and ask for alignment with numbers, not booleans.
        data = pickle.dumps(content, protocol=2).replace(b"\x89\x88\x87", b"K\x00K\x01\x87")
        path.write_bytes(data)
        return [name, hashlib.md5(path.read_bytes()).hexdigest()]

    def batch(name, rows):
        data = pixels[rows].reshape(-1, 3072)
        return write(name, {"data": data, "labels": [i % 10 for i in range(12)][rows]})

    batches = [batch(f"data_batch_{i + 1}", slice(2 * i, 2 * i + 2)) for i in range(5)]
    monkeypatch.setattr(CIFAR10, "train_list", batches)
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch", slice(10, 12))])
    meta = write("batches.meta", {"label_names": names})
    facts = {"filename": meta[0], "key": "label_names", "md5": meta[1]}
    monkeypatch.setattr(CIFAR10, "meta", facts)
    return tmp_path, pixels


def test_cifar10_is_read_from_its_own_files(cifar10):
    data_dir, pixels = cifar10
    source = open_source("cifar10", data_dir=data_dir)
    assert (source.num_classes, source.channels, source.image_size) == (10, 3, (32, 32))
    assert source.class_names[3] == "cat"
    assert source.train.labels.tolist() == list(range(10))
    assert source.test.labels.tolist() == [0, 1]
    np.testing.assert_allclose(source.train.read([7, 2]), pixels[[7, 2]] / 255, atol=1e-7)
    np.testing.assert_allclose(source.test.read([1]), pixels[[11]] / 255, atol=1e-7)


def test_cifar10_is_never_fetched_unasked(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "download", lambda _: pytest.fail("fetched"))
    with pytest.raises(InputError, match=f"{tmp_path}/nothing.*`--download`"):
        open_source("cifar10", data_dir=tmp_path / "nothing")


def test_a_failed_download_is_told_in_one_sentence(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    def fail(_):
        raise URLError("no route to host")

    monkeypatch.setattr(CIFAR10, "download", fail)
    with pytest.raises(InputError, match=r"could not be fetched .*no route to host"):
        open_source("cifar10", data_dir=tmp_path, download=True)


# --- fake ------------------------------------------------------------------------------------


def test_fake_images_depend_on_seed_split_and_index_only():
    source = open_source("fake", image_size=20, seed=3, num_fake_images=50, num_fake_classes=7)
    assert (source.num_classes, source.channels, source.image_size) == (7, 3, (20, 20))
    assert (len(source.train), len(source.test)) == (50, 10)
    assert source.train.labels.max() == 6
    x = source.train.read([4, 0, 4], epoch=5)
    assert torch.equal(x[0], x[2])
    assert not torch.equal(x[0], x[1])
    again = open_source("fake", image_size=20, seed=3, num_fake_images=9)
    assert torch.equal(again.train.read([4]), x[:1])
    assert not torch.equal(again.test.read([0]), x[1:2])
    assert not torch.equal(open_source("fake", image_size=20, seed=4).train.read([4]), x[:1])
    assert x.min() >= 0
    assert x.max() <= 1
    assert open_source("fake").image_size == (224, 224)


# --- folders ---------------------------------------------------------------------------------


def test_a_folder_is_read_by_class_and_name(folder):
    source = open_source(str(folder))
    assert source.class_names == ("cat", "dog")
    assert source.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.test.labels.tolist() == [0, 0, 1, 1]
    expected = np.asarray(Image.open(folder / "train/dog/1.png")).transpose(2, 0, 1) / 255
    x = source.train.read([4, 0])
    assert x.shape == (2, 3, 8, 8)
    assert x.is_contiguous()
    np.testing.assert_allclose(x[0], expected, atol=1e-7)
    normalised = open_source(str(folder), mean=0.5, std=0.25).train.read([4])
    torch.testing.assert_close(normalised[0], (x[0] - 0.5) / 0.25)


@pytest.fixture
def decoded(monkeypatch):
    """The paths that are decoded, in order."""
    paths, read_image = [], images.read_image
    monkeypatch.setattr(folders, "read_image", lambda path: paths.append(path) or read_image(path))
    return paths


def test_images_are_decoded_once_where_they_fit_and_each_time_where_not(
    folder, decoded, monkeypatch
):
    train = open_source(str(folder), image_size=8).train
    decoded.clear()  # some were, to say what they are like
    first = train.read([0, 1])
    assert torch.equal(train.read([1, 0]).flip(0), first)
    assert len(decoded) == 2
    monkeypatch.setattr(split, "CACHE_BYTES", 6 * 8 * 8 * 3 - 1)
    train = open_source(str(folder), image_size=8).train
    decoded.clear()
    assert torch.equal(train.read([0, 1]), first)
    assert torch.equal(train.read([0, 1]), first)
    assert len(decoded) == 4


def test_threads_change_nothing_and_raise_the_first_error(folder, monkeypatch):
    (folder / "train/cat/1.png").write_bytes(b"")
    (folder / "train/dog/1.png").write_bytes(b"")
    monkeypatch.setattr(images, "NUM_THREADS", 4)
    plain = open_source(str(folder), augment=True).train.read([0, 2, 3, 5])
    monkeypatch.setattr(split, "THREADS_PAY_BYTES", 0)
    train = open_source(str(folder), augment=True).train
    assert torch.equal(train.read([0, 2, 3, 5]), plain)
    for _ in range(10):
        with pytest.raises(InputError, match=r"train/dog/1\.png"):
            train.read([5, 0, 4, 1])


def test_reading_nothing_gives_an_empty_batch_and_a_wrong_index_an_error(folder):
    train = open_source(str(folder)).train
    assert train.read([]).shape == (0, 3, 8, 8)
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"image {index} of 0 … 5"):
            train.read([0, index])


def test_another_size_is_an_error_that_names_both_sizes_and_the_flag(folder):
    (folder / "train/dog/1.png").write_bytes(png(size=(9, 5)))
    words = "train/dog/1.png: is 5×9 pixels.*train/cat/0.png is 8×8.*`--image-size`"
    check_refusals([([0, 4], words)], open_source(str(folder)).train.read)
    assert open_source(str(folder), image_size=6).train.read([0, 4]).shape == (2, 3, 6, 6)


def test_bad_images_are_errors_or_left_out_and_counted(folder):
    bad = [folder / "test/dog/0.png", folder / "train/cat/0.png", folder / "train/dog/2.png"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UnreadableImage, match=r"cat/0\.png"):
        open_source(str(folder), image_size=8).train.read([0])
    kept = open_source(str(folder), skip_bad_images=True)
    assert kept.bad_images == tuple(map(str, [*bad[1:], bad[0]]))
    assert kept.train.labels.tolist() == [0, 0, 1, 1]
    assert kept.test.labels.tolist() == [0, 0, 1]
    stored = open_source(str(folder), image_size=8).stored
    assert stored is not None
    found = images.find_bad_images(stored.load, stored.image_ids())
    assert found == [("train", 0), ("train", 5), ("test", 2)]
    assert sorted(stored.splits[name].load.name_of(i) for name, i in found) == list(map(str, bad))
    shared = open_source(str(folder), bad_images=frozenset(found))
    assert shared.bad_images == kept.bad_images
    assert torch.equal(shared.train.read(range(4)), kept.train.read(range(4)))


def test_images_of_a_single_class_are_refused_whatever_holds_them(folder):
    """Every model knew all of them."""
    pixels, labels = np.zeros((4, 8, 8), np.uint8), np.zeros(4, int)
    arrays = {"x_train": pixels, "y_train": labels, "x_test": pixels, "y_test": labels}
    np.savez(folder / "one.npz", **arrays)
    np.savez(folder / "one-of-two.npz", **arrays, class_names=np.array(["cat", "dog"]))
    for name in ("train", "test"):
        shutil.rmtree(folder / name / "dog")
    rows = [
        (folder / name, f"{name}: all {num} training images are of one class, '{class_}'")
        for name, num, class_ in (("", 3, "cat"), ("one.npz", 4, "0"), ("one-of-two.npz", 4, "cat"))
    ]
    check_refusals(rows, lambda path: open_source(str(path)), where=folder)
    with pytest.raises(InputError, match="of one class, '0'"):
        open_source("fake", num_fake_classes=1)


def test_a_class_of_nothing_but_bad_images_is_an_error(folder):
    for path in (folder / "test/dog").iterdir():
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"test/dog/0.png: .* all 2 test images of class 'dog'"):
        open_source(str(folder), skip_bad_images=True)


def test_a_test_class_that_train_lacks_is_named_and_a_missing_one_is_fine(folder):
    (folder / "test/cat").rename(folder / "test/bird")
    with pytest.raises(InputError, match=r"test/bird: .*train has no class 'bird'"):
        open_source(str(folder))
    (folder / "test/bird").rename(folder / "test/.bird")
    source = open_source(str(folder))
    assert source.num_classes == 2
    assert source.test.labels.tolist() == [1, 1]


WRONG_USE = [
    ("imagnet", {}, "imagnet.*digits.*cifar10.*fake.*folder"),
    ("digits", {"image_size": 0}, "`--image-size`.*got 0"),
    ("digits", {"std": 0.0}, r"^mean=.*, std=\(0\.0,\): expected .* above 0"),
    ("digits", {"mean": float("nan")}, r"^mean=\(nan,\), std=\(1.0,\): expected numbers"),
    ("fake", {"num_fake_images": 0}, "at least one image.*0"),
]


def test_wrong_use_is_told_with_its_numbers():
    check_refusals(WRONG_USE, lambda name, options: open_source(name, **options))


# --- augmentation ----------------------------------------------------------------------------


def test_an_augmented_image_depends_on_seed_epoch_and_index_only(folder):
    """Any order, any share, whatever the process-wide generators did before."""
    source = open_source(str(folder), augment=True, seed=5)
    whole = source.train.read(range(6), 2)
    random.seed(3)
    torch.manual_seed(3)
    before = states()
    parts = torch.cat([source.train.read([2, 0, 4], 2), source.train.read([1, 5, 3], 2)])
    assert torch.equal(parts, whole[[2, 0, 4, 1, 5, 3]])
    assert states() == before
    assert not torch.equal(source.train.read(range(6), 1), whole)
    other = open_source(str(folder), augment=True, seed=6)
    assert not torch.equal(other.train.read(range(6), 2), whole)
    plain = open_source(str(folder))
    assert not torch.equal(plain.train.read(range(6), 2), whole)
    assert torch.equal(source.test.read(range(4), epoch=1), plain.test.read(range(4)))


# --- the rest --------------------------------------------------------------------------------
