"""What the members of a tar mean: samples with labels, or images in class folders."""

import os
from pathlib import Path

import pytest

from tests.data.tars.writing import tar_of, write_tar
from tests.refusals import check_refusals
from vigpipe.data.tars.images import find_images
from vigpipe.errors import InputError


def find(path: Path, field: str | None = None):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return find_images(descriptor, path.stat().st_size, str(path), field)
    finally:
        os.close(descriptor)


def found(path: Path, field: str | None = None) -> list[tuple[str, int]]:
    """The name and the label of every sample."""
    images = find(path, field)
    return [(images.names[i], int(images.labels[i])) for i in range(len(images))]


def classes(path: Path) -> list[tuple[str, str]]:
    """The name and the folder of every image."""
    images = find(path)
    assert images.num_samples == 0
    return [(images.names[i], images.folders[int(images.labels[i])]) for i in range(len(images))]


# ---- samples ----------------------------------------------------------------------------------


def test_samples_are_images_with_labels_under_one_key(tmp_path):
    tar = write_tar(
        tmp_path / "x.tar",
        {
            "a/0.cls": b"3\n",
            "a/0.JPEG": b"image",
            "a/0.json": b"no JSON, and not asked",
            "b/0.0.webp": b"another kind of member: 0.webp",
            "b/1.seg.png": b"another one",
            "b/1.png": b"image",
            "b/1.json": b'{"label": 12, "other": [1]}',
            "README.md": b"",
        },
    )
    images = find(tar)
    assert found(tar) == [("a/0.JPEG", 3), ("b/1.png", 12)]
    assert images.sizes.tolist() == [5, 5]
    assert all(tar.read_bytes()[at : at + 5] == b"image" for at in images.offsets)
    assert images.num_samples == 2


def test_a_named_field_of_the_json_is_the_label_and_negative_ones_leave_samples_out(tmp_path):
    files = {"0.jpg": b"", "0.cls": b"7", "0.json": b'{"label": 1, "few": 5}'}
    files |= {"1.jpg": b"", "1.json": b'{"label": 1, "few": -1}'}
    tar = write_tar(tmp_path / "x.tar", files)
    assert found(tar, "few") == [("0.jpg", 5)]
    assert find(tar, "few").num_samples == 2
    with pytest.raises(InputError, match=r"0\.json: has no label, .* as 'eleven'"):
        find(tar, "eleven")


NOT_WHOLE = [
    ({"b.jpg": b""}, r"b: has \.jpg, but a sample is one image and one label"),
    ({"b.jpg": b"", "b.png": b"", "b.cls": b"1"}, r"b: has \.jpg and \.png and \.cls, but"),
    ({"b.jpg": b"", "b.cls": b"cat"}, r"b\.cls: has no label, expected a whole number in 0 …"),
    ({"b.jpg": b"", "b.cls": b"-1"}, r"b\.cls: has no label"),
    ({"b.jpg": b"", "b.cls": b"1048576"}, r"b\.cls: has no label, .* 0 … 1048575"),
    ({"b.jpg": b"", "b.cls": b"9" * 65}, r"b\.cls: has no label, .* in at most 64 bytes"),
    ({"b.jpg": b"", "b.json": b"{}"}, r"b\.json: has no label, .* as 'label'"),
    ({"b.jpg": b"", "b.json": b'{"label": -1}'}, r"b\.json: has no label"),
    ({"b.jpg": b"", "b.json": b'{"label": true}'}, r"b\.json: has no label"),
    ({"b.jpg": b"", "b.json": b'{"label": 1.0}'}, r"b\.json: has no label"),
    ({"b.jpg": b"", "b.json": b'{"label": 1, "label": 2}'}, r"b\.json: has no label"),
    ({"b.jpg": b"", "b.json": b"[" * 100_000}, r"b\.json: has no label"),
    ({"b.jpg": b"", "b.json": b" " * ((1 << 20) + 1)}, r"b\.json: .* in at most 1048576 bytes"),
]


def test_samples_that_are_not_whole_are_refused_by_name(tmp_path):
    tar = tmp_path / "x.tar"

    def read(files):
        find(write_tar(tar, {"a.jpg": b"", "a.cls": b"0", **files}))

    check_refusals(NOT_WHOLE, read, f"^{tar}: ")


def test_images_with_json_but_no_label_are_no_class_of_their_own(tmp_path):
    """A tar of pictures and captions, as img2dataset writes it, would be the class 00000."""
    tar = write_tar(tmp_path / "00000.tar", {"0.jpg": b"", "0.json": b'{"caption": "a cat"}'})
    with pytest.raises(InputError, match=r"0\.json: has no label"):
        find(tar)


# ---- class folders ----------------------------------------------------------------------------


def test_the_class_of_an_image_is_its_folder(tmp_path):
    names = ["cat/1.png", "cat/1.json", "dog/1.JPEG", "2.gif", "dog/list.txt", "cat/2.png"]
    files = {**dict.fromkeys(names, b""), "cat/1.json": b'{"caption": "a cat"}'}
    tar = write_tar(tmp_path / "x.y.tar", files)
    folders = {"cat/1.png": "/cat", "dog/1.JPEG": "/dog", "2.gif": "/", "cat/2.png": "/cat"}
    assert classes(tar) == list(folders.items())


def test_tars_in_a_tar_are_read_where_they_lie(tmp_path):
    content = {"1.png": b"first", "sub/2.png": b"other"}
    tar = write_tar(
        tmp_path / "x.tar", {"n/01.tar": tar_of(content), "n/02.tar": tar_of({"1.png": b"third"})}
    )
    assert classes(tar) == [
        ("n/01.tar: 1.png", "01/"),
        ("n/01.tar: sub/2.png", "01/sub"),
        ("n/02.tar: 1.png", "02/"),
    ]
    at = [tar.read_bytes()[offset : offset + 5] for offset in find(tar).offsets]
    assert at == [b"first", b"other", b"third"]


INNER = {"1.png": b""}
WITHOUT = [
    ({}, "holds no images"),
    ({"a.txt": b"", "b.npy": b""}, "holds no images"),
    ({"b.npy": b"", "b.cls": b"1"}, r"has labels \(\.cls\) but no image beside one"),
    ({"a.tar": tar_of({})}, r"a\.tar: holds no images"),
    ({"a.tar": tar_of({"b.tar": tar_of(INNER)})}, r"a\.tar: b\.tar: is a tar in a tar in a"),
    (dict.fromkeys(("train/a.tar", "val/a.tar"), tar_of(INNER)), "has tars in train and in val"),
    ({"a.tar": b"?" * 2000}, r"a\.tar: is not a tar file"),
    ({f"{'a' * 256}.tar": tar_of(INNER)}, "a name of more than 255 bytes"),
]


def test_tars_without_images_or_with_worse_are_refused(tmp_path):
    tar = tmp_path / "x.tar"
    check_refusals(WITHOUT, lambda files: find(write_tar(tar, files)), f"^{tar}: (.*)?")
