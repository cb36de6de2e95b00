"""Which files of a folder are images of which class, whatever links and permissions there are."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.data.tars.writing import png
from tests.refusals import check_refusals
from vigpipe.data import open_source
from vigpipe.data.formats import folders
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


def test_the_splits_are_train_and_test_or_val(tmp_path):
    for name in ("a/train", "b/test", "d/train", "d/val", "e/train", "e/val", "e/test"):
        (tmp_path / name).mkdir(parents=True)
    rows = [
        ("a", f"{tmp_path}/a: has no folder test/ or val/;"),
        ("b", f"{tmp_path}/b: has no folder train/;"),
        ("absent", f"{tmp_path}/absent: cannot be listed"),
    ]
    check_refusals(rows, lambda name: folders.split_folders(tmp_path / name))
    for name, test in (("d", "val"), ("e", "test")):
        root = tmp_path / name
        assert folders.split_folders(root) == (root / "train", root / test)


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
    touch(tmp_path, "train/2.png", "test/a/.hidden", "val/a/1.png", "validation/a/1.png")
    assert folders.read(tmp_path).notes == (
        f"{tmp_path}/val and {tmp_path}/validation: not read, as the test images are those of "
        "test/; --validation holds out training images instead",
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
