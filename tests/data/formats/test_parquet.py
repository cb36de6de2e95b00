import os
import pickle
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.formats.small_sets import (
    LABELS,
    NAMES,
    check_images,
    features,
    noise,
    table,
    write_parquet,
)
from tests.refusals import check_refusals
from vigpipe.data.formats import parquet, tables
from vigpipe.data.formats.parquet import holds, read
from vigpipe.errors import InputError


def train(root: Path) -> Path:
    return next((root / "data").glob("train*"))


@pytest.mark.parametrize(
    "layout",
    ["data/{}-00000-of-00001.parquet", "{}-00000-of-00001-8f2c.parquet", "{}/0000.parquet"],
)
def test_pixels_labels_and_class_names_are_those_of_the_table(tmp_path, layout):
    stored = read(write_parquet(tmp_path, layout))
    assert holds(tmp_path)
    assert stored.class_names == tuple(NAMES)
    assert stored.notes == ()
    check_images(stored, 3)
    assert stored.train.load.name_of(7) == f"{tmp_path / layout.format('train')}: row 7"


def test_labels_may_be_texts_and_a_split_beside_the_test_is_told(tmp_path):
    texts = {split: pa.array(np.array(NAMES)[labels]) for split, labels in LABELS.items()}
    texts["test"] = texts["test"].dictionary_encode()
    write_parquet(tmp_path, **{split: table(split, label=texts[split]) for split in texts})
    train(tmp_path).with_name("validation-0.parquet").write_bytes(train(tmp_path).read_bytes())
    stored = read(tmp_path)
    assert stored.class_names == tuple(NAMES)
    check_images(stored, 3)
    assert stored.notes == (f"{tmp_path}: not read: validation",)


def test_several_files_are_read_in_the_order_of_their_names(tmp_path):
    for i in (1, 0):
        part = {split: table(split).slice(i * 3, 3) for split in LABELS}
        write_parquet(tmp_path, f"{{}}-{i:05}-of-00002.parquet", **part)
    stored = read(tmp_path)
    assert stored.train.labels.tolist() == LABELS["train"][:6].tolist()
    np.testing.assert_array_equal(stored.train.load(4), noise("train", 3)[4])


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "snappy", "data_page_version": "2.0"},
        {"compression": "zstd", "use_dictionary": False},
    ],
)
def test_files_may_be_compressed_and_pages_be_of_either_kind(tmp_path, options):
    write_parquet(tmp_path)
    small = {"dictionary_pagesize_limit": 400, "data_page_size": 400, "write_batch_size": 1}
    pq.write_table(table("train"), train(tmp_path), **small, **options)
    load = read(tmp_path).train.load
    for index in range(12):
        np.testing.assert_array_equal(load(index), noise("train", 3)[index])


def test_a_row_group_is_decompressed_once_in_each_process(tmp_path, monkeypatch):
    groups, decompress = [], tables.encoded
    monkeypatch.setattr(tables, "encoded", lambda column: groups.append(0) or decompress(column))
    load = read(write_parquet(tmp_path)).train.load
    assert not groups  # opening decompresses none
    for _ in range(2):
        for index in (0, 4, 11):
            load(index)
    assert len(groups) == 2  # of rows 0 … 4 and 10 … 11
    pickled = pickle.dumps(load)
    assert b"PNG" not in pickled
    np.testing.assert_array_equal(pickle.loads(pickled)(7), load(7))


def test_a_table_beside_image_files_makes_no_parquet_data_set_of_them(tmp_path):
    for folder in (tmp_path, tmp_path / "train"):
        folder.mkdir(exist_ok=True)
        (folder / "metadata.parquet").touch()
        (folder / ".train.parquet").touch()
    assert not holds(tmp_path)


# ---- what is refused ------------------------------------------------------------------------


def test_large_data_sets_are_refused_with_the_way_to_map_them(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MOST_BYTES", 1000)
    with pytest.raises(InputError, match=r"at most 1000 are kept .*\.save_to_disk\(NEW\)"):
        read(write_parquet(tmp_path))


def rename(path):
    for number, other in enumerate(sorted(path.parent.iterdir())):
        other.rename(other.with_name(f"{number}.parquet"))


def write_labels(path, labels, **options):
    pq.write_table(table("train", label=pa.array(labels)), path, **options)


DELTA = {"use_dictionary": False, "column_encoding": {"label": "DELTA_BYTE_ARRAY"}}


REFUSED = [
    (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be read"),
    (lambda path: next(path.parent.glob("test*")).unlink(), "files of train, exp"),
    (rename, "has parquet files of no split, expected train and one of test"),
    (lambda path: write_labels(path, ["a"] * 12), "one are texts and one are numbers"),
    (lambda path: write_labels(path, ["a"] * 12, **DELTA), "save .* class_encode_column\\('label'"),
    (lambda path: pq.write_table(table("train")[:0], path), "there are no train images"),
    (lambda path: (path.unlink(), os.mkfifo(path)), "is not a regular file"),  # nobody waits
]


def test_what_is_wrong_is_told_in_one_sentence(tmp_path):
    def read_damaged(damage):
        root = Path(mkdtemp(dir=tmp_path))
        damage(train(write_parquet(root)))
        read(root)

    check_refusals(REFUSED, read_damaged)


def test_one_large_value_in_every_row_is_kept_once(tmp_path):
    """As plain values, these 64 KiB of a file would be 64 MiB in memory, and could be terabytes."""
    big = np.random.default_rng(0).bytes(1 << 16)
    bomb = pa.array([{"bytes": big, "path": None}] * 1000)
    path = train(write_parquet(tmp_path))
    pq.write_table(table("train", features(None))[:0], path)
    rows = pa.table({"image": bomb, "label": pa.array([0] * 1000)})
    pq.write_table(rows.replace_schema_metadata(table("train").schema.metadata), path)
    assert path.stat().st_size < 1 << 18
    before = pa.total_allocated_bytes()
    load = read(tmp_path).train.load
    with pytest.raises(InputError, match="row 0: cannot be read as an image"):
        load(0)
    assert pa.total_allocated_bytes() - before < 1 << 18


def test_a_row_group_with_more_bytes_than_its_file_says_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_RATIO", 0)
    load = read(write_parquet(tmp_path)).train.load
    with pytest.raises(InputError, match=r"row group 0 has .* bytes in 5 rows, but the file says"):
        load(0)
