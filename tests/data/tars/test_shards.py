"""Which tars hold the train images and which the test images."""

import json
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.refusals import check_refusals
from vigpipe.data.tars.shards import find_shards, seem_there


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def found(root):
    """The names of the train tars, and of the test tars."""
    splits = find_shards(root)
    return [[str(path.relative_to(root)) for path in shards.paths] for shards in splits.values()]


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        (["train.tar", "val.tar", "test.tar", "train/a.txt"], ["train.tar"], ["test.tar"]),
        (["TRAIN.TAR", "Val.tar"], ["TRAIN.TAR"], ["Val.tar"]),
        (
            ["x-train-01.tar", "x-train-00.tar", "x-validation-00.tar"],
            ["x-train-00.tar", "x-train-01.tar"],
            ["x-validation-00.tar"],
        ),
        (
            ["ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"],
            ["ILSVRC2012_img_train.tar"],
            ["ILSVRC2012_img_val.tar"],
        ),
        (
            ["train/dog.tar", "train/cat.tar", "train/list.txt", "train/.x.tar", "val/cat.tar"],
            ["train/cat.tar", "train/dog.tar"],
            ["val/cat.tar"],
        ),
        (["train/train.tar", "val/train.tar"], ["train/train.tar"], ["val/train.tar"]),  # a class
        (["info.json.txt", "train0.tar", "test0.tar"], ["train0.tar"], ["test0.tar"]),
    ],
)
def test_splits_are_told_by_names(tmp_path, names, train, test):
    root = touch(tmp_path, *names)
    assert seem_there(root)
    assert found(root) == [train, test]


@pytest.mark.parametrize(
    "names",
    [
        ["train/cat/1.png", "test/cat/1.png", "train.tar", "test.tar"],  # unpacked, and kept
        ["train/cat/1.png", "train/cat.tar", "test/cat/1.png", "info.json"],
        ["train/1.png"],
        [],
    ],
)
def test_folders_of_images_and_other_folders_are_none_of_tars(tmp_path, names):
    assert not seem_there(touch(tmp_path, *names))


NO_SPLITS = [
    (["train.tar"], "has no tar files of test images; expected test.tar or val.tar or valid"),
    (["test.tar"], r"has no tar files of train images; expected train\.tar"),
    (["train-test.tar", "test.tar"], "train-test.tar: has both 'train' and 'test' in its name"),
    (["train.tar.gz", "test.tar"], r"train\.tar\.gz: is compressed, and can only be read from"),
    (["train/a.tgz", "test/a.tgz"], r"a\.tgz: is compressed"),
    (["x-train.tfrecord-00000-of-00001", "x-validation.tfrecord-00000-of-00001"], "is a TFRec"),
]


def test_what_has_no_two_splits_of_tars_is_refused(tmp_path):
    def read(names):
        root = touch(Path(mkdtemp(dir=tmp_path)), *names)
        assert seem_there(root)
        find_shards(root)

    check_refusals(NO_SPLITS, read)


SINGLE = [
    ("pictures.tar", "is one tar file, .* name a folder with train.tar and test.tar"),
    ("pictures.tar.xz", "is compressed"),
    ("pictures.tfrecord", "is a TFRecord file"),
]


def test_a_single_file_is_refused(tmp_path):
    def read(name):
        assert seem_there(touch(tmp_path, name) / name)
        find_shards(tmp_path / name)

    check_refusals(SINGLE, read)


# ---- lists ------------------------------------------------------------------------------------

TRAIN = {"name": "train", "filenames": ["a-0.tar", "x/a-1.tar"], "num_samples": 5}
LIST = {"splits": {"train": {**TRAIN, "shard_lengths": [3, 2]}, "validation": TRAIN}}


def write_list(root, content, name="_info.json"):
    (root / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return root


@pytest.mark.parametrize("name", ["_info.json", "info.json"])
def test_a_list_names_the_tars_and_counts_their_samples(tmp_path, name):
    root = write_list(touch(tmp_path, "a-0.tar"), LIST, name)
    assert seem_there(root)
    shards = find_shards(root)
    assert shards["train"].paths == (root / "a-0.tar", root / "x/a-1.tar")
    assert (shards["train"].lengths, shards["train"].num_samples) == ((3, 2), 5)
    assert (shards["test"].lengths, shards["test"].num_samples) == (None, 5)
    assert shards["test"].field is None


def test_a_list_may_name_tars_in_folders_alone(tmp_path):
    assert seem_there(write_list(touch(tmp_path, "x/a-1.tar"), LIST))
    assert not seem_there(touch(tmp_path / "other", "info.json"))


def test_a_list_may_name_the_field_of_the_label(tmp_path):
    both = {"train": {**TRAIN, "alt_label": "twelve"}, "test": {**TRAIN, "alt_label": ""}}
    shards = find_shards(write_list(tmp_path, {"splits": both}))
    assert (shards["train"].field, shards["test"].field) == ("twelve", None)


@pytest.mark.parametrize("content", [{"splits": {"train": {"num_examples": 3}}}, {"splits": 3}, []])
def test_an_info_file_about_something_else_is_passed_over(tmp_path, content):
    root = write_list(touch(tmp_path, "train.tar", "test.tar"), content)
    assert found(root) == [["train.tar"], ["test.tar"]]


def with_train(**changes):
    return {"splits": {"train": {**TRAIN, **changes}, "test": TRAIN}}


LISTS = [
    ("{", "is not the JSON it should be"),
    ({"splits": {"train": TRAIN}}, "lists no test images, .* under test or val or validation"),
    (with_train(filenames=[]), "filenames of train are not a list of .tar files"),
    (with_train(filenames=[1]), "filenames of train are not"),
    (with_train(filenames=["../a.tar"]), "filenames of train are not"),
    (with_train(filenames=["/etc/a.tar"]), "filenames of train are not"),
    (with_train(filenames=["https://example.org/a.tar"]), "filenames of train are not"),
    (with_train(filenames=["a.tar.gz"]), "filenames of train are not"),
    (with_train(filenames=["a\n.tar"]), "filenames of train are not"),
    (with_train(filenames=["a.tar", "./a.tar"]), "lists a file of train twice"),
    (with_train(shard_lengths=[1]), "shard_lengths of train are not 2 whole numbers"),
    (with_train(shard_lengths=[1, "2"]), "shard_lengths of train are not"),
    (with_train(num_samples="5"), "expected a whole number as num_samples of train"),
    (with_train(alt_label=["a"]), "and a text as alt_label"),
]


def test_a_wrong_list_is_refused(tmp_path):
    begin = f"^{tmp_path}/_info.json: .*"
    check_refusals(LISTS, lambda content: find_shards(write_list(tmp_path, content)), begin)
