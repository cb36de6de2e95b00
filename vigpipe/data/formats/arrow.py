"""A folder of Hugging Face's `DatasetDict.save_to_disk`: Arrow streams, which are mapped.

dataset_dict.json              the names of the splits
train/state.json               the names of the files
train/data-00000-of-00001.arrow
test/ ...                      or validation/ or val/
"""

import os
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vigpipe.data.formats import tables
from vigpipe.data.per_process import PerProcess
from vigpipe.data.stored import Stored, StoredImages
from vigpipe.errors import InputError
from vigpipe.files.arrow import need_pyarrow, reading_arrow
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import opened, read_json

if TYPE_CHECKING:
    import pyarrow as pa

_SPLITS = "dataset_dict.json"
_STATE = "state.json"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_ADVICE = "it is damaged or not wholly downloaded: fetch the data set or save it again"


def holds(path: Path) -> bool:
    """Whether the names in a folder are those of save_to_disk, also of a single split."""
    is_split = all(os.path.isfile(path / name) for name in (_STATE, "dataset_info.json"))
    return is_split or os.path.isfile(path / _SPLITS)


def read(root: Path) -> Stored:
    """Map the files, and read the labels and the names of the classes."""
    need_pyarrow(root)
    splits = _splits(root)
    used = "train", next(name for name in tables.TEST_SPLITS if name in splits)
    paths = {name: _files(root / name) for name in used}
    columns = tables.check_same(
        {path: _columns(path) for files in paths.values() for path in files}
    )
    train, test = (_read_split(files, columns) for files in paths.values())
    return tables.stored(
        root, train, test, columns.class_names, [name for name in splits if name not in used]
    )


def _splits(root: Path) -> list[str]:
    """List the splits, train and one for testing among them."""
    if not os.path.isfile(root / _SPLITS):
        raise InputError(
            f"{root}: is a single split, expected a DatasetDict of train and test; cut it with "
            "train_test_split of datasets, and save that"
        )
    table = read_json(root / _SPLITS)
    names = table.get("splits") if isinstance(table, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{root / _SPLITS}: has no list `splits`; save the data set again")
    if "train" in names and not set(names).isdisjoint(tables.TEST_SPLITS):
        return names
    raise InputError(
        f"{root}: has the splits {escaped(', '.join(names)) or 'none'}, expected train and one of "
        f"{', '.join(tables.TEST_SPLITS)}; rename or cut them with datasets, and save them again"
    )


def _files(folder: Path) -> list[Path]:
    state = read_json(folder / _STATE)
    entries: Any = state.get("_data_files") if isinstance(state, dict) else None
    entries = entries if isinstance(entries, list) else []
    names = [e["filename"] for e in entries if isinstance(e, dict) and _is_name(e.get("filename"))]
    if not names or len(names) < len(entries):
        raise InputError(
            f"{folder / _STATE}: has no list `_data_files` of names of files beside it; save the "
            "data set again"
        )
    if state.get("_indices_data_files"):
        raise InputError(
            f"{folder / _STATE}: lists the chosen rows in another file, as old versions of "
            "datasets did; load the data set and save it again"
        )
    paths = [folder / name for name in names]
    tables.check_shards(paths)
    return paths


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and text != "" and Path(text).name == text


def _columns(path: Path) -> tables.Columns:
    import pyarrow as pa

    opened(path).close()  # This refuses what is not a regular file.
    with (
        reading_arrow(path, _ADVICE),
        pa.memory_map(str(path)) as file,
        pa.ipc.open_stream(file) as rows,
    ):
        return tables.find_columns(rows.schema, path)


def _read_split(paths: Sequence[Path], columns: tables.Columns) -> StoredImages:
    groups, labels = [], [np.empty(0, np.int64)]
    for path in paths:
        with reading_arrow(path, _ADVICE):
            labels.append(tables.read_labels(_column(path, columns.label), path))
        images = PerProcess(partial(_images, path, columns.image, len(labels[-1])))
        images()
        groups.append(tables.RowGroup(path, 0, len(labels[-1]), images))
    return StoredImages(np.concatenate(labels), tables.EncodedImages(groups))


def _images(path: Path, column: str, num_rows: int) -> "pa.ChunkedArray":
    with reading_arrow(path, _ADVICE):
        images = tables.encoded(_column(path, column))
        if len(images) != num_rows:
            raise ValueError(f"{len(images)} images, but {num_rows} labels")
        return images


def _column(path: Path, name: str) -> "pa.ChunkedArray":
    """Map a column; its numbers and bytes stay in the file until they are looked at."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:  # Closing it keeps the map of what is in use.
        for message in pa.ipc.MessageReader.open_stream(file):
            if message.type == "dictionary":
                raise ValueError("it has dictionaries, which save_to_disk does not write")
            if message.type == "record batch" and _is_compressed(message.metadata.to_pybytes()):
                raise ValueError("it is compressed, which save_to_disk does not do")
        end = file.tell()
        file.seek(max(0, end - len(_END_OF_STREAM)))
        if file.read() != _END_OF_STREAM:
            raise ValueError("it does not end where its rows end")
        file.seek(0)
        with pa.ipc.open_stream(file) as stream:
            index = stream.schema.get_field_index(name)
        options = pa.ipc.IpcReadOptions(included_fields=[index], use_threads=False)
        file.seek(0)
        with pa.ipc.open_stream(file, options=options) as stream:
            return stream.read_all().column(0)


def _is_compressed(metadata: bytes) -> bool:
    """Tell from a message without its body whether the buffers of a record batch are compressed.

    Decompressing could take any amount of memory, and pyarrow cannot say beforehand whether it will
    do so. In Arrow's Message.fbs, the record batch is field 2 of a message, and its compression is
    field 3 of the batch; pyarrow has verified the flatbuffers.
    """

    def field(table: int, number: int) -> int:
        """Return the position of a field of a table, 0 if it is not there."""
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        entry = 4 + 2 * number
        if entry >= struct.unpack_from("<H", metadata, vtable)[0]:
            return 0
        offset = struct.unpack_from("<H", metadata, vtable + entry)[0]
        return offset and table + offset

    def target(position: int) -> int:
        return position + struct.unpack_from("<I", metadata, position)[0]

    return field(target(field(target(0), 2)), 3) != 0
