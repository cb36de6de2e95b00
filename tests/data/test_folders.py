"""Which files of a folder are images of which class, whatever links and permissions there are."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from tests.data.tars.writing import png
from tests.refusals import check_refusals
from tests.test_cli import make_pictures
from vigpipe.data import open_source
from vigpipe.data.formats import folders
from vigpipe.data.images import find_bad_images
from vigpipe.errors import InputError


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def test_images_are_listed_by_class_and_name_and_nothing_else(tmp_path):
    touch(tmp_path, "dog/2.png", "dog/10.JPG", "cat/b.png", "cat/more/a.webp", ".hidden/x.png")
    touch(tmp_path, "dog/.x.png", "dog/notes.txt", "dog/png", "README.png")
    touch(tmp_path, "dog/x.png/1.png")  # a folder, whatever it is called
    listed = folders.list_classes(tmp_path)
    assert list(listed) == ["cat", "dog"]
    assert listed["cat"] == [tmp_path / "cat/b.png", tmp_path / "cat/more/a.webp"]
    assert listed["dog"] == [tmp_path / "dog" / n for n in ("10.JPG", "2.png", "x.png/1.png")]


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\nb", b"\x1b[2J", "\u202egnp".encode()])
def test_a_class_whose_name_cannot_be_kept_or_printed_is_refused(name, tmp_path):
    # The name goes into the weights file: the whole training ran, and then they were lost.
    touch(tmp_path, "cat/a.png", f"{os.fsdecode(name)}/b.png")
    rows = [(tmp_path, "the class folder .* has control characters")]
    check_refusals(rows, folders.list_classes)


def test_an_empty_class_and_a_folder_without_classes_are_errors(tmp_path):
    touch(tmp_path, "some/cat/notes.txt", "none/1.png")
    rows = [
        ("none", f"{tmp_path}/none.*no class folders"),
        ("some", f"{tmp_path}/some/cat.*class 'cat' has no images"),
    ]
    check_refusals(rows, lambda name: folders.list_classes(tmp_path / name))


def test_the_splits_are_train_test_and_val(tmp_path):
    there = {
        "train test": {"train": "train", "test": "test"},
        "train val": {"train": "train", "test": "val"},
        "train test validation": {"train": "train", "test": "test", "validation": "validation"},
        "Train TEST valid": {"train": "Train", "test": "TEST", "validation": "valid"},
        "test": {"test": "test"},
        "train": {"train": "train"},
        "cat dog": {"train": "."},
    }
    touch(tmp_path / "left", "train/a/1.png", "test/a/1.png", "b/1.png", "labels.txt")
    assert folders.read(tmp_path / "left").notes == (f"{tmp_path / 'left'}: not read: b",)
    for name, expected in there.items():
        root = tmp_path / name
        for folder in name.split():
            (root / folder).mkdir(parents=True)
        assert folders.split_folders(root) == {split: root / f for split, f in expected.items()}
    for folder in ("val", "validation"):
        (tmp_path / "both" / folder).mkdir(parents=True)
    rows = [
        (folders.split_folders, "both", "has val/ and validation/, expected one folder"),
        (folders.read, "absent", "absent: cannot be listed"),
    ]
    check_refusals(rows, lambda read, name: read(tmp_path / name))


def test_validation_images_of_ones_own_are_scored_in_every_evaluation(tmp_path):
    make_pictures(tmp_path / "new", 3, 2)
    (make_pictures(tmp_path / "other", 4, 1) / "train").rename(tmp_path / "new" / "val")
    source = open_source(str(tmp_path / "new"))
    assert source.validation is not None
    assert [len(split) for split in source.splits] == [6, 4, 8]
    with pytest.raises(InputError, match=r"--validation 0\.1: .* has validation images of its own"):
        open_source(str(tmp_path / "new"), validation=0.1)


def test_a_folder_of_classes_only_gives_a_share_of_each_for_the_test(tmp_path):
    root = make_pictures(tmp_path, 10, 1) / "train"
    whole = folders.read(root)
    assert (len(whole.train), len(whole.test)) == (20, 0)
    source = open_source(str(root), test=0.2, validation=0.25, seed=3)
    assert source.validation is not None
    assert [np.bincount(s.labels).tolist() for s in source.splits] == [[6, 6], [2, 2], [2, 2]]
    every = [
        source.train.read(range(12)),
        source.test.read(range(4)),
        source.validation.read(range(4)),
    ]
    assert len({image.numpy().tobytes() for images in every for image in images}) == 20
    others = open_source(str(root), test=0.2, seed=4).test.read(range(4))
    assert not torch.equal(others, every[1])
    rows = [
        (root, {}, "has no test images; say which share .* --test 0.2"),
        (tmp_path, {"test": 0.2}, "--test 0.2: .* has test images of its own"),
        (root, {"test": 0.01}, "--test 0.01: holds no image out, for the largest class has 10"),
    ]
    check_refusals(rows, lambda name, options: open_source(str(name), **options))


def test_test_images_are_held_out_of_those_that_can_be_read(tmp_path):
    root = make_pictures(tmp_path, 8, 1) / "train"
    (root / "cat" / "3.png").write_bytes(b"")
    source = open_source(str(root), test=0.25, skip_bad_images=True)
    assert source.bad_images == (str(root / "cat" / "3.png"),)
    assert source.stored is not None
    ids = find_bad_images(source.stored.load, source.stored.image_ids())
    again = open_source(str(root), test=0.25, bad_images=[("train", 3)])
    assert ids == []
    for one, other in zip(source.splits, again.splits, strict=True):
        assert torch.equal(one.read(range(len(one))), other.read(range(len(other))))


def test_images_of_the_test_in_one_folder_have_a_list_of_their_classes(tmp_path):
    touch(tmp_path, "train/n02/1.JPEG", "train/n01/1.JPEG", "train/n03/1.JPEG")
    names = [f"ILSVRC2012_val_0000000{i}" for i in (1, 2, 3, 4)]
    touch(tmp_path, *(f"val/{name}.JPEG" for name in names))
    expected = ["n03", "n01", "n01", "n02"]
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")
    leaves = [(3, "n01", "a", "", 0), (1, "n02", "b", "", 0), (2, "n03", "c", "", 0)]
    synsets = np.array([*leaves, (4, "n9", "", "", 3)], [(field, object) for field in fields])
    lists = {
        "LOC_val_solution.csv": "ImageId,PredictionString\n"
        + "".join(f"{n},{c} 1 2 3 4\n" for n, c in zip(names, expected, strict=True)),
        "val.txt": "".join(
            f"{n}.JPEG {int(c[2]) - 1}\n" for n, c in zip(names[::-1], expected[::-1], strict=True)
        ),
        "ILSVRC2012_validation_ground_truth.txt": "2\n3\n3\n1\n",
    }
    savemat(tmp_path / "meta.mat", {"synsets": synsets})
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        stored = folders.read(tmp_path)
        assert stored.class_names == ("n01", "n02", "n03")
        found = {
            Path(stored.test.load.name_of(i)).stem: f"n0{label + 1}"
            for i, label in enumerate(stored.test.labels)
        }
        assert found == dict(zip(names, expected, strict=True)), name
        (tmp_path / name).unlink()
    wrong = [
        ("val.txt", "\n", "val.txt: ILSVRC2012_val_00000001.JPEG has no class; give the list"),
        ("val.txt", f"{names[0]}.JPEG 0\n" * 2, "ILSVRC2012_val_00000001.JPEG is there twice"),
        ("val.txt", f"test/{names[0]}.JPEG 0", "test/ILSVRC2012_val_00000001.JPEG is not of val/"),
        ("val.txt", "".join(f"{n}.JPEG 0\n" for n in (*names, "a")), "a.JPEG is not in .*val; g"),
        ("val.txt", f"{names[0]}.JPEG 3", "'3', expected a number from 0 to 2; mend it"),
        ("val.txt", "image", "the line 'image', expected ILSVRC2012_val_00000001.JPEG 65"),
        ("LOC_val_solution.csv", "head\nimage", "the line 'image', expected ILSVRC2012_val_"),
        ("ILSVRC2012_validation_ground_truth.txt", "1\n", "has 1 lines, and .*val 4 images"),
    ]

    def read(name, text):
        (tmp_path / name).write_text(text)
        try:
            folders.read(tmp_path)
        finally:
            (tmp_path / name).unlink()

    check_refusals(wrong, read)
    check_refusals(
        [("val: has images and no class folders; .* val.txt",)], lambda: folders.read(tmp_path)
    )
    mats = {
        "its classes are not numbered from 1": {"synsets": synsets[:2]},
        "an array has more than": {"synsets": np.zeros(1 << 22)},
        "it is not a file of MATLAB 5": None,
    }
    for words, content in mats.items():
        (tmp_path / "meta.mat").write_bytes(b"MATLAB" * 30)
        if content is not None:
            savemat(tmp_path / "meta.mat", content, do_compression=True)
        row = (next(reversed(lists)), "1\n" * 4, rf"meta.mat: is not the devkit's .*\({words}")
        check_refusals([row], read)
    (tmp_path / "val").rename(tmp_path / "test")
    (tmp_path / "test.txt").write_text(lists["val.txt"])
    assert len(folders.read(tmp_path).test) == 4  # a list of val/ is not one of test/


def test_folders_a_level_too_deep_are_no_classes(tmp_path):
    """They were one class, of which every model knows all images."""
    for name in ("deep/train/images", "deep/test/images", "test/train", "test/test/images"):
        touch(tmp_path, f"{name}/cat/1.png", f"{name}/dog/1.png")
    touch(tmp_path, "year/train/cat/2001/1.png", "year/train/dog/1.png", "year/test/cow/cat.png")
    rows = [
        (
            "deep",
            r"deep/train/images: holds 2 folders \(cat, dog\) and no image, .* 'images'; move",
        ),
        ("test", r"test/test/images: holds 2 folders \(cat, dog\) and no image, "),
        ("year", r"year/test/cow: .*/year/train has no class 'cow'"),
    ]
    check_refusals(rows, lambda name: folders.read(tmp_path / name))


def test_what_is_left_out_is_told_in_a_line_each(tmp_path):
    touch(tmp_path, *(f"{split}/{name}/1.png" for split in ("train", "test") for name in "ab"))
    assert folders.read(tmp_path).notes == ()
    touch(tmp_path, "train/a/1.heic", "train/a/b/2.HEIC", "test/labels.csv", "train/b/notes")
    touch(tmp_path, "train/2.png", "test/a/.hidden")
    assert folders.read(tmp_path).notes == (
        f"{tmp_path}/train: images in no class folder are left out (1)",
        "4 files are left out, as the suffix is not one of an image: 2 .heic, 1 without one, "
        "1 .csv",
    )


# --- folders that are odd --------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Two classes with one train and one test image each."""
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.png").write_bytes(png())
    return tmp_path


@pytest.mark.parametrize("target", [".", "..", "../../.."])
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


@pytest.mark.parametrize(
    ("closed", "mode"),  # with 0o444 names may be listed, but nothing be opened
    [(".", 0), ("train", 0o444), ("train/cat", 0), ("train/cat/more", 0o444)],
)
def test_a_folder_without_permission_is_one_sentence(as_nobody, closed, mode):
    root, become_nobody = as_nobody
    for name in ("train/cat/more", "train/dog", "test/cat"):
        (root / name).mkdir(parents=True)
        (root / name / "1.png").write_bytes(png())
    (root / closed).chmod(mode)
    become_nobody()
    with pytest.raises(InputError) as caught:
        open_source(str(root), skip_bad_images=True)
    assert str(root / closed) in str(caught.value)
