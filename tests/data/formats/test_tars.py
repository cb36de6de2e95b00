"""Tars give the images and labels that the same images give as a folder."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.data.dataset_factory import create_dataset
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from tests.data.tars.writing import png, tar_of, write_tar
from tests.refusals import check_refusals
from tests.test_cli import make_pictures
from vigpipe.data import open_source
from vigpipe.data.formats import tars


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pictures(tmp_path):
    """A folder of two classes with 3 train and 2 test images each."""
    return make_pictures(tmp_path / "pictures", 3, 2)


Files = dict[str, bytes]


def split_files(pictures: Path, split: str) -> Files:
    """The images of a split by class/name, in another order than that of their names."""
    paths = sorted((pictures / split).rglob("*.png"), reverse=True)
    return {str(path.relative_to(pictures / split)): path.read_bytes() for path in paths}


def samples(files: Files, label_kind: str = "cls") -> Files:
    """The same images as WebDataset's samples, ordered by class and name."""
    found: Files = {}
    for name in sorted(files):
        label = 0 if name.startswith("cat") else 1
        key = name.removesuffix(".png")
        text = str(label) if label_kind == "cls" else json.dumps({"label": label, "height": 8})
        found |= {f"{key}.png": files[name], f"{key}.{label_kind}": text.encode()}
    return found


def by_class(files: Files) -> dict[str, Files]:
    return {
        name: {key.partition("/")[2]: files[key] for key in files if key.startswith(name)}
        for name in ("cat", "dog")
    }


# ---- layouts, each written into `root` --------------------------------------------------------


def folders_in_a_tar(root, train, test):
    write_tar(root / "train.tar", train)
    write_tar(root / "test.tar", test)


def folders_below_a_folder_in_a_tar(root, train, test):
    write_tar(root / "train.tar", {f"./train/{name}": data for name, data in train.items()})
    write_tar(root / "val.tar", {f"val/{name}": data for name, data in test.items()})


def a_tar_for_each_class(root, train, test):
    for split, files in (("train", train), ("val", test)):
        for name, images in by_class(files).items():
            write_tar(root / split / f"{name}.tar", images)


def tars_of_classes_in_a_tar(root, train, test):
    tars_inside = {f"{name}.tar": tar_of(images) for name, images in by_class(train).items()}
    write_tar(root / "ILSVRC2012_img_train.tar", tars_inside)
    write_tar(root / "ILSVRC2012_img_val.tar", test)


def several_tars_of_folders(root, train, test):
    for i, name in enumerate(train):
        write_tar(root / "train" / f"{i}.tar", {name: train[name]})
    write_tar(root / "test" / "0.tar", test)


def shards_by_name(root, train, test):
    files = list(samples(train).items())
    write_tar(root / "x-train-0000.tar", dict(files[:4]))
    write_tar(root / "x-train-0001.tar", dict(files[4:]))
    write_tar(root / "x-validation-00.tar", samples(test))


def shards_in_folders(root, train, test):
    write_tar(root / "train" / "0.tar", samples(train, "json"))
    write_tar(root / "test" / "0.tar", samples(test, "json"))
    (root / "classnames.txt").write_text("cat\ndog\n")


def shards_in_a_list(root, train, test):
    files = list(samples(train).items())
    write_tar(root / "b.tar", dict(files[:8]))
    write_tar(root / "a.tar", dict(files[8:]))
    write_tar(root / "c.tar", samples(test))
    lists = {
        "train": {"filenames": ["b.tar", "a.tar"], "shard_lengths": [4, 2], "num_samples": 6},
        "validation": {"filenames": ["c.tar"], "shard_lengths": [4], "num_samples": 4},
    }
    (root / "_info.json").write_text(json.dumps({"splits": lists}))


OF_FOLDERS = [
    folders_in_a_tar,
    folders_below_a_folder_in_a_tar,
    a_tar_for_each_class,
    tars_of_classes_in_a_tar,
    several_tars_of_folders,
]
OF_SAMPLES = [shards_by_name, shards_in_folders, shards_in_a_list]


def write(layout, root, pictures):
    root.mkdir()
    layout(root, split_files(pictures, "train"), split_files(pictures, "test"))
    return root


@pytest.mark.parametrize("layout", OF_FOLDERS + OF_SAMPLES)
def test_every_layout_gives_the_images_of_the_folder_in_its_order(layout, pictures, tmp_path):
    root = write(layout, tmp_path / "tars", pictures)
    assert tars.holds(root)
    for _ in range(2):  # found, and from the cache
        ours, expected = open_source(str(root)), open_source(str(pictures))
        has_names = layout in OF_FOLDERS or layout is shards_in_folders
        assert ours.class_names == (expected.class_names if has_names else ("0", "1"))
        for split, other in ((ours.train, expected.train), (ours.test, expected.test)):
            assert split.labels.tolist() == other.labels.tolist()
            assert torch.equal(split.read(range(len(split))), other.read(range(len(other))))
    images = tars.read(root).train
    load = pickle.loads(pickle.dumps(images.load))
    tar, _, inside = load.name_of(5).partition(": ")
    assert Path(tar).is_relative_to(root)
    assert inside.endswith("2.png")
    np.testing.assert_array_equal(load(5), images.load(5))


def test_a_link_to_a_tar_is_the_class_of_its_own_name(tmp_path):
    """As in the cache of Hugging Face's hub; the first name must not come out of our cache."""
    blob = write_tar(tmp_path / "blob", {"1.png": png()})
    for name in ("cat", "dog"):
        for split in ("train", "val"):
            link = tmp_path / name / split / f"{name}.tar"
            link.parent.mkdir(parents=True)
            link.symlink_to(blob)
        assert tars.read(tmp_path / name).class_names == (name,)


@pytest.mark.parametrize("layout", OF_FOLDERS)
def test_timm_finds_the_same_labels_in_the_same_tars(layout, pictures, tmp_path):
    root = write(layout, tmp_path / "tars", pictures)
    if (root / "train").is_dir():
        reader: Any = ReaderImageInTar(str(root / "train"))
    else:
        (tar,) = root.glob("*train.tar")
        dataset: Any = create_dataset("", root=str(tar))
        reader = dataset.reader
    names = {label: name for name, label in reader.class_name_to_idx.items()}
    theirs = [
        (member.name.removeprefix("./"), names[int(label)])
        for (member, _, _), label in zip(reader.samples, reader.targets, strict=True)
    ]
    stored = tars.read(root)
    ours = [
        (stored.train.load.name_of(i).rpartition(": ")[2], stored.class_names[label])
        for i, label in enumerate(stored.train.labels)
    ]
    assert sorted(ours) == sorted(theirs)
    assert len(ours) == 6


# ---- refused ----------------------------------------------------------------------------------

ONE = {"cat/1.png": png()}
SAMPLE, OTHER = {"1.png": png(), "1.cls": b"0"}, {"2.png": b"", "2.cls": b"1"}


TOGETHER = [
    (ONE, {"dog/1.png": b""}, "test.tar: holds test images of class 'dog', but the train imag"),
    (ONE, {}, "test.tar: holds no images"),
    ({"1.png": b""}, ONE, "train.tar: its images are in no class folders and have no labels"),
    ({**ONE, "1.png": b""}, ONE, "train.tar: has images in no class folder, but other images"),
    ({**ONE, "cat/a/1.png": b""}, ONE, "train.tar: has images in cat/a, where it is unclear"),
    ({"cat.tar": tar_of({"a/1.png": b"", "b/c/1.png": b""})}, ONE, "has images in b/c, where"),
    (SAMPLE, ONE, "test.tar: no image has a label .* all tars are of one kind"),
    (ONE, SAMPLE, "train.tar: no image has a label .*test.tar they have"),
    (SAMPLE, OTHER, r"test\.tar: 2\.png: has the label 1, but there are 1 classes"),
]


def test_tars_that_do_not_go_together_are_refused(tmp_path):
    def read(train, test):
        folders_in_a_tar(tmp_path, train, test)
        tars.read(tmp_path)

    check_refusals(TOGETHER, read)


def test_one_image_in_two_tars_is_refused(tmp_path):
    for name in ("train-0.tar", "train-1.tar", "test.tar"):
        write_tar(tmp_path / name, ONE)
    words = "train-0.tar: cat/1.png: is in .*train-1.tar: cat/1.png too"
    check_refusals([(tmp_path, words)], tars.read)


def test_a_class_whose_tar_has_an_unprintable_name_is_refused(tmp_path):
    for split in ("train", "test"):
        write_tar(tmp_path / split / os.fsdecode(b"caf\xe9.tar"), {"1.png": b""})
    words = r"train: the tar caf\\xe9.tar of a class has control characters"
    check_refusals([(tmp_path, words)], tars.read)


def write_info(root: Path, **splits: dict) -> None:
    (root / "_info.json").write_text(json.dumps({"splits": splits}))


def test_a_list_that_counts_otherwise_is_refused(pictures, tmp_path):
    root = write(shards_in_a_list, tmp_path / "tars", pictures)
    splits = json.loads((root / "_info.json").read_text())["splits"]

    def read(**change):
        write_info(root, **{**splits, "train": splits["train"] | change})
        tars.read(root)

    rows = [
        ({"shard_lengths": [3, 3]}, r"b\.tar: has 4 samples, but the list gives 3"),
        ({"num_samples": 7}, r"has 6 samples from b\.tar on, but the list gives 7"),
        ({"filenames": ["b.tar", "d.tar"]}, r"d\.tar: cannot be read \(No such file"),
    ]
    check_refusals(rows, lambda change: read(**change))


def test_samples_left_out_for_their_label_may_be_counted_or_not(tmp_path):
    files = {"1.png": png(), "1.json": b'{"few": 0}', "2.png": b"", "2.json": b'{"few": -1}'}
    entry = {"filenames": ["a.tar"], "shard_lengths": [2], "alt_label": "few"}
    write_tar(tmp_path / "a.tar", files)
    for count in (1, 2):
        counted = entry | {"num_samples": count}
        write_info(tmp_path, train=counted, test=counted)
        assert tars.read(tmp_path).train.labels.tolist() == [0]
    write_tar(tmp_path / "a.tar", {"1.png": png(), "1.json": b'{"few": -1}'})
    entry["shard_lengths"] = [1]
    write_info(tmp_path, train=entry, test=entry)
    words = "a.tar: no sample has a label 'few' of 0 or more"
    check_refusals([(tmp_path, words)], tars.read)


def test_a_wrong_list_of_class_names_is_refused(tmp_path):
    folders_in_a_tar(tmp_path, SAMPLE, {**SAMPLE, "1.cls": b"1"})

    def read(content):
        (tmp_path / "classes.txt").write_bytes(content)
        tars.read(tmp_path)

    rows = [
        (b"cat", r"test\.tar: 1\.png: has the label 1, but there are 1 classes"),
        (b"cat\n\ndog\n", "line 2 is '', expected the name of class 1"),
        (b"\xff", "is not UTF-8"),
    ]
    check_refusals(rows, read)


def test_addresses_and_pipes_are_refused_for_that_reason():
    names = ("https://example.org/train-{000..146}.tar", "pipe:cat train.tar")
    words = "is an address or a pipe, but each image is read from"
    check_refusals([(name, words) for name in names], open_source)
