"""A folder of parquet files in one of the layouts of Hugging Face's hub.

    train-00000-of-00002.parquet ...   test-00000-of-00001.parquet, also in a folder data/
    train/0000.parquet ...             test/0000.parquet

Instead of test, validation or val will do. To read one row, its whole row group is decompressed:
each process keeps in memory the groups that it has read from, so large data sets are refused.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vigpipe.data.formats import tables
from vigpipe.data.per_process import PerProcess
from vigpipe.data.stored import Stored, StoredImages
from vigpipe.errors import InputError
from vigpipe.files.arrow import need_pyarrow, reading_arrow
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import opened

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_SPLITS = ("train", *tables.TEST_SPLITS)
_NAME = re.compile(rf"({'|'.join(_SPLITS)})([-_.].*)?\.parquet", re.DOTALL)
MOST_BYTES = 1 << 30  # Once a process has read the encoded images, it keeps all of them in memory.
_MOST_ROWS = 1 << 24  # A file's size says nothing of them: runs of equal labels take no room in it.
# Some programs count a row group's images after compression, so they may be larger than it says by
# this ratio; and each row takes some bytes in memory besides.
_RATIO, _ROW_BYTES = 4, 16
_SAVE = "datasets.load_dataset('parquet', data_dir=OLD).save_to_disk(NEW)"
_ADVICE = f"fetch it again, or save the data set in a folder that can be mapped: {_SAVE}"


def holds(path: Path) -> bool:
    """Whether a folder has parquet files, by their names."""
    return bool(_list_files(path) or _parquet_files(path))


def read(root: Path) -> Stored:
    """Read the labels and the names of the classes; refuse images that take too much memory."""
    need_pyarrow(root)
    paths = _list_files(root)
    test_split = next((name for name in tables.TEST_SPLITS if name in paths), None)
    if test_split is None or "train" not in paths:
        raise InputError(
            f"{root}: has parquet files of {', '.join(paths) or 'no split'}, expected train and "
            f"one of {', '.join(tables.TEST_SPLITS)}; fetch the others, or cut the data set with "
            "train_test_split of datasets"
        )
    files = {name: [_look_at(path) for path in paths[name]] for name in ("train", test_split)}
    for name in files:
        tables.check_shards(paths[name])
    columns = tables.check_same(
        {file.path: file.columns for split in files.values() for file in split}
    )
    num_bytes = sum(file.num_bytes for split in files.values() for file in split)
    if num_bytes > MOST_BYTES:
        raise InputError(
            f"{root}: its images have {num_bytes} bytes, at most {MOST_BYTES} are kept in "
            f"memory, and parquet files have no access by row; make a folder that can be mapped: "
            f"{_SAVE}"
        )
    train, test = (_read_split(split) for split in files.values())
    return tables.stored(
        root, train, test, columns.class_names, [name for name in paths if name not in files]
    )


@dataclass(frozen=True)
class _File:
    """What a file says at its end."""

    path: Path
    columns: tables.Columns
    groups: tuple[tuple[int, int], ...]  # rows of each row group, and its bytes before compression

    @property
    def num_rows(self) -> int:
        return sum(num_rows for num_rows, _ in self.groups)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.groups)


def _list_files(root: Path) -> dict[str, list[Path]]:
    """List the files of each split by name, in the first layout that has any."""
    for folder in (root, root / "data"):
        found: dict[str, list[Path]] = {}
        for path in _parquet_files(folder):
            if match := _NAME.fullmatch(path.name):
                found.setdefault(match[1], []).append(path)
        if found:
            return found
    return {name: paths for name in _SPLITS if (paths := _parquet_files(root / name))}


def _parquet_files(folder: Path) -> list[Path]:
    """List the files of a folder, none if it cannot be listed, sorted by name."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".parquet")]
    except OSError:
        return []
    # Hugging Face puts metadata.parquet beside the folders of image files.
    return [folder / n for n in sorted(names) if n != "metadata.parquet" and not n.startswith(".")]


@contextmanager
def _opened(path: Path, *, dictionary: Sequence[str] = ()) -> Iterator["pq.ParquetFile"]:
    """Open a file; what is wrong with it is an InputError."""
    import pyarrow.parquet as pq

    opened(path).close()  # This refuses what is not a regular file.
    with (
        reading_arrow(path, _ADVICE),
        pq.ParquetFile(path, read_dictionary=list(dictionary)) as file,
    ):
        yield file


def _look_at(path: Path) -> _File:
    """Read where the columns are; the numbers are the file's own, and may be false."""
    with _opened(path) as file:
        columns = tables.find_columns(file.schema_arrow, path)
        # Not the bytes of the column: pyarrow 26 aborts at damage in a column's own description.
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        found = _File(path, columns, tuple((g.num_rows, g.total_byte_size) for g in groups))
        if any(min(group) < 0 for group in found.groups) or found.num_rows > _MOST_ROWS:
            raise ValueError(f"row groups of {found.num_rows} rows, expected 0 … {_MOST_ROWS}")
    return found


def _read_split(files: Sequence[_File]) -> StoredImages:
    groups, labels = [], [np.empty(0, np.int64)]
    for file in files:
        with _opened(file.path, dictionary=[file.columns.label]) as table:
            column = _read_column(table, file)
            labels.append(tables.read_labels(column, file.path))
            if len(labels[-1]) != file.num_rows:
                raise ValueError(f"{len(labels[-1])} labels in {file.num_rows} rows")
        first_row = 0
        for group, (num_rows, num_bytes) in enumerate(file.groups):
            open_ = partial(_decompress, file.path, group, file.columns.image, num_rows, num_bytes)
            groups.append(tables.RowGroup(file.path, first_row, num_rows, PerProcess(open_)))
            first_row += num_rows
    return StoredImages(np.concatenate(labels), tables.EncodedImages(groups))


def _read_column(table: "pq.ParquetFile", file: _File) -> "pa.ChunkedArray":
    """Read the labels; equal texts once in a row group, as a small file may repeat a large one."""
    import pyarrow as pa

    name, num_bytes, chunks = file.columns.label, 0, []
    for group in range(table.num_row_groups):
        try:
            column = table.read_row_group(group, [name], use_threads=False).column(0)
        except OSError as error:
            if "Not yet implemented" not in str(error):
                raise
            raise InputError(
                f"{file.path}: the texts of the column {escaped(name)} are in an encoding of which "
                f"a small file can hold any number ({escaped(str(error))}); save the data set "
                f"after class_encode_column({escaped(name)!r})"
            ) from error
        num_bytes += column.nbytes
        if num_bytes > MOST_BYTES:
            raise ValueError(f"the column {name} has more than {MOST_BYTES} bytes")
        chunks += column.chunks
    return pa.chunked_array(chunks, chunks[0].type if chunks else pa.int64())


def _decompress(
    path: Path, group: int, column: str, num_rows: int, num_bytes: int
) -> "pa.ChunkedArray":
    """Read the images of a row group; equal ones once, as a small file may repeat a large one."""
    name = f"{column}.{tables.BYTES}"
    with _opened(path, dictionary=[name]) as file:
        table = file.read_row_group(group, [name], use_threads=False)
        images = tables.encoded(table.column(0))
        most = _RATIO * num_bytes + _ROW_BYTES * (num_rows + 1)
        if len(images) != num_rows or images.nbytes > most:
            raise ValueError(
                f"row group {group} has {images.nbytes} bytes in {len(images)} rows, but the "
                f"file says {num_bytes} in {num_rows}"
            )
        return images
