import json
import pickle
import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pyarrow as pa
import pytest

from tests.data.formats.small_sets import (
    LABELS,
    NAMES,
    check_images,
    features,
    table,
    write_saved,
    write_stream,
)
from tests.refusals import check_refusals
from vigpipe.data import open_source
from vigpipe.data.formats.arrow import holds, read
from vigpipe.errors import InputError

REAL = Path(__file__).parent / "saved-by-datasets"


@pytest.mark.parametrize(("tested", "files"), [("test", 2), ("validation", 1), ("val", 2)])
def test_pixels_labels_and_class_names_are_those_of_the_table(tmp_path, tested, files):
    stored = read(write_saved(tmp_path, tested, files))
    assert holds(tmp_path)
    assert stored.class_names == tuple(NAMES)
    check_images(stored, 3)
    row = 7 if files == 1 else 1
    name = f"train/data-{files - 1:05}-of-{files:05}.arrow: row {row}"
    assert stored.train.load.name_of(7) == f"{tmp_path}/{name}"


def test_what_datasets_itself_has_saved_is_read():
    """datasets 5.2.0 wrote it: 5 and 3 images of 2×2 pixels, in which all are 10 × (row + 1)."""
    source = open_source(str(REAL))
    assert source.class_names == ("no", "yes")
    assert source.train.labels.tolist() == [0, 1, 0, 1, 0]
    assert (source.train.read(range(5)) * 255).round()[:, 0, 0, 0].tolist() == [10, 20, 30, 40, 50]
    assert (source.test.read(range(3)) * 255).round()[:, 2, 1, 1].tolist() == [10, 20, 30]


def test_labels_without_names_are_called_by_their_numbers(tmp_path):
    tables = {split: table(split, features(None)) for split in LABELS}
    assert read(write_saved(tmp_path, **tables)).class_names == ("0", "1", "2")


def test_images_are_mapped_by_each_process_and_not_pickled(tmp_path):
    load = read(write_saved(tmp_path)).train.load
    before = pa.total_allocated_bytes()
    pickled = pickle.dumps(load)
    assert b"PNG" not in pickled
    again = pickle.loads(pickled)
    np.testing.assert_array_equal(again(7), load(7))
    assert pa.total_allocated_bytes() - before < 64  # bits that say which rows have bytes, at most


def test_an_image_that_is_only_a_path_is_a_bad_image(tmp_path):
    images = table("train")["image"].to_pylist()
    images[4:6] = [{"bytes": None, "path": "/etc/passwd"}, None]
    type_ = table("train").schema.field("image").type
    write_saved(tmp_path, train=table("train", image=pa.array(images, type_)))
    load = read(tmp_path).train.load
    for index in (4, 5):
        with pytest.raises(InputError, match=r"row [45]: has no encoded image, at most a path"):
            load(index)
    source = open_source(str(tmp_path), skip_bad_images=True)
    assert (len(source.bad_images), len(source.train)) == (2, 10)


def test_a_single_split_is_known_and_other_files_called_state_are_not(tmp_path):
    assert holds(REAL / "train")
    (tmp_path / "state.json").touch()
    assert not holds(tmp_path)


# ---- what is refused ------------------------------------------------------------------------

FILE = "train/data-00001-of-00002.arrow"


def cut(root, end):
    (root / FILE).write_bytes((root / FILE).read_bytes()[:end])


def rewrite(root, **options):
    rows = pa.ipc.open_stream((root / FILE).read_bytes()).read_all()
    write_stream(root / FILE, rows, **options)


def dictionary(root):
    rows = pa.ipc.open_stream((root / FILE).read_bytes()).read_all()
    more = pa.array(["a"] * len(rows)).dictionary_encode()
    write_stream(root / FILE, rows.append_column("more", more))


def splits(root, value):
    (root / "dataset_dict.json").write_text(json.dumps({"splits": value}))


def state(root, **changes):
    path = root / "train/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def files(root, *names):
    state(root, _data_files=[{"filename": name} for name in names])


def wrong_labels(root, *labels):
    write_saved(root, test=table("test", label=pa.array(labels)))


REFUSED = [
    (lambda root: (root / FILE).unlink(), "cannot be read"),
    (lambda root: cut(root, -8), "does not end where its rows end"),
    (lambda root: cut(root, -2000), "data-00001.*damaged or not wholly"),
    (lambda root: rewrite(root, compression="lz4"), "it is compressed"),
    (dictionary, "it has dictionaries"),
    (
        lambda root: (root / "dataset_dict.json").rename(root / "state.json"),
        "is a single split, expected a DatasetDict .* train_test_split",
    ),
    (
        lambda root: splits(root, ["train", "rest"]),
        "has the splits train, rest, expected train and one of test, validation, val",
    ),
    (lambda root: splits(root, 1), "no list"),
    (lambda root: state(root, _data_files=7), "no list"),
    (lambda root: files(root, "../../passwd"), "no list `_data_files` of names of files beside it"),
    (lambda root: files(root, Path(FILE).name), "is one of 2 files by its name, but 1 are there"),
    (lambda root: state(root, _indices_data_files=[{"filename": "i"}]), "chosen rows in another"),
    (
        lambda root: wrong_labels(root, 0, 1, 2, 3, 0, 1),
        "test image 3 has the label 3, but with 3 classes labels are 0 … 2",
    ),
    (lambda root: wrong_labels(root, *[0, 1, None] * 2), "of-00002.arrow: 1 of 3 rows have no lab"),
    (lambda root: write_saved(root, files=1, test=table("test")[:0]), "there are no test images"),
    (
        lambda root: write_saved(root, test=table("test", features(["dog", "cat", "emu"]))),
        r"the names of its classes, differ from those of \.\./train/data-00000",
    ),
]


def test_what_is_wrong_is_told_in_one_sentence(tmp_path):
    def read_damaged(damage):
        root = Path(mkdtemp(dir=tmp_path))
        damage(write_saved(root))
        read(root)

    check_refusals(REFUSED, read_damaged)


def test_an_image_whose_bytes_lie_outside_its_file_is_refused(tmp_path):
    """pyarrow reads such a file without a word, and the process dies where it looks at the row."""
    path = write_saved(tmp_path, files=1) / "train/data-00000-of-00001.arrow"
    image = table("train")["image"].chunk(0).field("bytes")
    offsets = np.frombuffer(image.buffers()[1], np.int32)[:6].tobytes()
    content = path.read_bytes()
    assert offsets in content
    path.write_bytes(content.replace(offsets, offsets[:-4] + b"\0\0\0\x7f", 1))
    with pytest.raises(InputError, match=r"00001\.arrow: cannot be read"):
        read(tmp_path)


def test_without_pyarrow_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("vigpipe.files.arrow.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install pyarrow, or .* vigpipe\[arrow\]"):
        read(write_saved(tmp_path))


def test_a_file_that_changes_while_it_is_in_use_is_an_error_of_one_sentence(tmp_path):
    pickled = pickle.dumps(read(write_saved(tmp_path)).train.load)
    shutil.copy(tmp_path / "test/data-00000-of-00002.arrow", tmp_path / FILE)
    with pytest.raises(InputError, match="3 images, but 6 labels"):
        pickle.loads(pickled)(7)
