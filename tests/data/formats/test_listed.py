"""A table that names images, classes and splits."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.refusals import check_refusals
from vigpipe.data import formats, open_source


@pytest.fixture
def root(tmp_path):
    """Twelve images in one folder."""
    (tmp_path / "photos").mkdir()
    for i in range(12):
        Image.new("RGB", (4, 4), (20 * i, 0, 0)).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path


def write(path, rows, head="image,label"):
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    return path


def test_a_table_gives_classes_and_splits(root):
    rows = [f"photos/{i}.png;{10 - i % 3};{['train', 'test', 'Val'][i // 4]}" for i in range(12)]
    path = write(root / "l.csv", rows, "\ufeffPath;Class;Split")
    stored = formats.read(path)
    assert stored.class_names == ("8", "9", "10")  # numbers, as such
    assert stored.validation is not None
    assert [len(of) for of in stored.splits.values()] == [4, 4, 4]
    source = open_source(str(path))
    assert source.test.labels.tolist() == [1, 0, 2, 1]
    reds = source.test.read(range(4))[:, 0, 0, 0] * 255
    assert np.allclose(reds, [80, 100, 120, 140])


def test_classes_and_paths_do_not_depend_on_the_process_or_the_folder(root, monkeypatch):
    rows = [f"photos/{i}.png,{['01', '1', '2'][i % 3]}" for i in range(12)]
    path = write(root / "l.csv", rows)
    assert formats.read(path).class_names == ("01", "1", "2")
    monkeypatch.chdir(root)
    marks = [b"".join(formats.read(p).train.load.marks()) for p in (path, Path("l.csv"))]
    assert marks[0] == marks[1]
    (root / "photos.csv" / "train" / "a").mkdir(parents=True)
    check_refusals([(root / "photos.csv", "class 'a' has no images")], formats.read)


def test_without_splits_a_share_is_held_out_and_paths_may_be_absolute(root, monkeypatch):
    rows = [f'"{root}/photos/{i}.png"\t"a, or {i % 2}"' for i in range(12)]
    path = write(root / "l.tsv", rows, "file_name\tcategory")
    source = open_source(str(path), test=1 / 3)
    assert (len(source.train), len(source.test)) == (8, 4)
    assert source.class_names == ("a, or 0", "a, or 1")


def test_what_is_wrong_in_a_table_is_told_with_its_line(root):
    rows = [
        (["photos/0.png,a"], "image,klass", "first line is to name one column label or class"),
        (["photos/0.png,a"], "image,path,label", "names 2 of these"),
        ([], "image,label", "names no image; add a line for each"),
        (["photos/0.png,a", "photos/1.png"], "image,label", "line 3: has 1 cells, and the head 2"),
        (["photos/0.png,a", "./photos/0.png,b"], "image,label", "line 3: .* is there twice"),
        (["photos/0.png,"], "image,label", "line 2: has no image or no class"),
        (["0.png,a"], "image,label", "/0.png: is the first image of .*, and is not there; paths"),
        (["photos/0.png,a,x"], "image,label,split", "line 2: is of the split 'x', expected train"),
        (["photos/0.png,a\x1b"], "image,label", "the name of class 0, .* control characters"),
    ]

    def read(lines, head):
        return formats.read(write(root / "l.csv", lines, head))

    check_refusals(rows, read)
