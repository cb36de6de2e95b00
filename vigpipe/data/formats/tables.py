"""Tables of Apache Arrow with a column of encoded images and one of labels, as Hugging Face's.

Those that its library `datasets` has not written will do, if they look the same.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vigpipe.data.formats.labels import check_labels
from vigpipe.data.images import LARGEST_BYTES, decode
from vigpipe.data.left_out import not_read
from vigpipe.data.per_process import PerProcess
from vigpipe.data.stored import Stored, StoredImages
from vigpipe.errors import InputError, UnreadableImage
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import no_duplicates

if TYPE_CHECKING:
    import pyarrow as pa

BYTES = "bytes"  # the field with an encoded image, beside one with its path, which is not followed
TEST_SPLITS = ("test", "validation", "val")  # the first that is there
_MOST_JSON_BYTES = 16 << 20


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are used, and of the classes by label, if the table has any."""

    image: str
    label: str
    class_names: tuple[str, ...] | None


@dataclass(frozen=True)
class RowGroup:
    """Rows that are opened together: an Arrow file, or a row group of a parquet file."""

    path: Path
    first_row: int
    num_rows: int
    images: "PerProcess[pa.ChunkedArray]"


@dataclass(frozen=True)
class EncodedImages:
    """Decodes the images of a split."""

    groups: Sequence[RowGroup]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([group.num_rows for group in self.groups])

    def __call__(self, index: int) -> Image.Image:
        group, row = self._find(index)
        content = group.images()[row].as_py()
        name = self.name_of(index)
        if content is None:
            raise UnreadableImage(
                f"{name}: has no encoded image, at most a path, which is not followed; store the "
                "images themselves, as datasets' save_to_disk does"
            )
        if len(content) > LARGEST_BYTES:
            raise UnreadableImage(
                f"{name}: its {len(content)} bytes are more than the {LARGEST_BYTES} that an image "
                "may have; store it smaller"
            )
        return decode(content, name)

    def name_of(self, index: int) -> str:
        group, row = self._find(index)
        return f"{group.path}: row {group.first_row + row}"

    def marks(self) -> Iterable[bytes]:
        for group in self.groups:
            num_bytes = os.stat(group.path).st_size
            yield f"{group.path.name} {num_bytes} {group.first_row} {group.num_rows}\0".encode()

    def _find(self, index: int) -> tuple[RowGroup, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        group = self.groups[number]
        return group, index - int(self._ends[number]) + group.num_rows


def check_shards(paths: Sequence[Path]) -> None:
    """Refuse missing files where names count them, as in train-00000-of-00002.parquet."""
    for path in paths:
        words = path.name.split(".")[0].replace("_", "-").split("-")
        if "of" not in words[:-1]:
            continue
        count = words[words.index("of") + 1]
        if count.isdecimal() and int(count) != len(paths):
            raise InputError(
                f"{path}: is one of {int(count)} files by its name, but {len(paths)} are there; "
                "fetch or save the data set again"
            )


def find_columns(schema: "pa.Schema", where: Path) -> Columns:
    """Find the columns of the images and of their labels.

    Hugging Face's description in the schema says which columns are images and class labels. Without
    one, images are the structure with the field `bytes`, and labels the integers or texts called
    `label` or `labels`. No such column, several, or one of another type are an InputError.
    """
    import pyarrow as pa

    features = _features(schema, where)
    types = {field.name: field.type for field in schema}
    if len(types) < len(schema):
        raise InputError(f"{where}: two columns have the same name; rename one")
    kinds = {name: _kind(features.get(name)) for name in types}
    image = _only(
        [n for n, kind in kinds.items() if kind == "Image" or (not kind and _has_bytes(types[n]))],
        ("image", "img"),
        "column of encoded images, as datasets.Image() makes them",
        types,
        where,
    )
    if not _has_bytes(types[image]):
        raise InputError(
            f"{where}: the column {escaped(image)} has the type {escaped(str(types[image]))}, "
            "expected encoded images in a field `bytes`; save the data set after cast_column with "
            "datasets.Image()"
        )
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    label = _only(
        labels or [name for name in types if name in ("label", "labels")],
        ("label", "labels"),
        "column of class labels, as datasets.ClassLabel() makes them, or called label",
        types,
        where,
    )
    if not pa.types.is_integer(types[label]) and not _is_text(types[label]):
        raise InputError(
            f"{where}: the column {escaped(label)} has the type {escaped(str(types[label]))}, "
            f"expected a whole number or a text for each image; save the data set after "
            f"class_encode_column({escaped(label)!r})"
        )
    return Columns(image, label, _class_names(features.get(label), where))


def _features(schema: "pa.Schema", where: Path) -> Mapping[str, Any]:
    """Read Hugging Face's description of the columns; empty if there is none."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    try:
        if len(text) > _MOST_JSON_BYTES:
            raise ValueError(f"it has {len(text)} bytes, expected at most {_MOST_JSON_BYTES}")
        features = json.loads(text, object_pairs_hook=no_duplicates)["info"]["features"]
        if not isinstance(features, dict):
            raise TypeError("its features are no table")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"{where}: Hugging Face's description of the columns cannot be read "
            f"({type(error).__name__}: {escaped(str(error))}); save the data set again"
        ) from error
    return features


def _kind(feature: Any) -> str:
    kind = feature.get("_type") if isinstance(feature, dict) else None
    return kind if isinstance(kind, str) else ""


def _has_bytes(type_: "pa.DataType") -> bool:
    import pyarrow as pa

    if not pa.types.is_struct(type_) or type_.get_field_index(BYTES) < 0:
        return False
    bytes_type = type_.field(BYTES).type
    return pa.types.is_binary(bytes_type) or pa.types.is_large_binary(bytes_type)


def _is_text(type_: "pa.DataType") -> bool:
    import pyarrow as pa

    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    return pa.types.is_string(value_type) or pa.types.is_large_string(value_type)


def _only(
    names: Sequence[str],
    usual: Sequence[str],
    what: str,
    types: Mapping[str, Any],
    where: Path,
) -> str:
    """Choose the only column, or of several the only one with a usual name."""
    if len(names) > 1:
        names = [name for name in names if name in usual] or names
    if len(names) == 1:
        return names[0]
    found = ", ".join(names or types)
    if names:
        raise InputError(
            f"{where}: has several columns where one {what}, is expected: {escaped(found)}; drop "
            "the others with datasets' remove_columns, and save it again"
        )
    raise InputError(
        f"{where}: has no {what}, among its columns {escaped(found)}; rename or cast the column, "
        "and save it again"
    )


def _class_names(feature: Any, where: Path) -> tuple[str, ...] | None:
    names = feature.get("names") if isinstance(feature, dict) else None
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{where}: its class names are not a list of texts; save the data set again"
        )
    return tuple(names)


def check_same(columns: Mapping[Path, Columns]) -> Columns:
    """Refuse files that differ in their columns or class names, and return these."""
    (first, expected), *others = columns.items()
    for path, found in others:
        if found != expected:
            raise InputError(
                f"{path}: its column of images or of labels, or the names of its classes, differ "
                f"from those of {os.path.relpath(first, path.parent)}; save both from one data set"
            )
    return expected


def read_labels(column: "pa.ChunkedArray", path: Path) -> np.ndarray:
    """Turn a column of labels into an array, (n,), of int64 or texts; refuse rows without one."""
    import pyarrow as pa

    column.validate(full=True)
    has_texts_once = pa.types.is_dictionary(column.type) and _is_text(column.type)
    num_absent = column.null_count
    if has_texts_once:
        num_absent += sum(chunk.dictionary.null_count for chunk in column.chunks)
    if num_absent:
        raise InputError(
            f"{path}: {num_absent} of {len(column)} rows have no label; leave them out, or take "
            "another split"
        )
    if has_texts_once:
        found = [np.empty(0, object)]
        for chunk in column.chunks:
            texts = chunk.dictionary.cast(pa.large_string()).to_numpy(zero_copy_only=False)
            found.append(texts[chunk.indices.to_numpy()])
        return np.concatenate(found)
    if _is_text(column.type):
        return column.cast(pa.large_string()).to_numpy()
    return column.cast(pa.int64()).to_numpy().copy()


def stored(
    root: Path,
    train: StoredImages,
    test: StoredImages,
    class_names: Sequence[str] | None,
    others: Sequence[str],
) -> Stored:
    """Number labels that are texts, and join the splits; `others` are those that are not read."""
    labels = check_labels(train.labels, test.labels, class_names, str(root))
    return Stored(
        labels.names,
        replace(train, labels=labels.train),
        replace(test, labels=labels.test),
        notes=not_read(str(root), others),
    )


def encoded(column: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """Take the encoded images out of a column of structures, and validate them."""
    import pyarrow as pa

    images = []
    for chunk in column.chunks:
        chunk.validate()  # Its fields are as long as itself.
        field = chunk.flatten()[chunk.type.get_field_index(BYTES)]
        field.validate(full=True)  # Its values lie within it.
        images.append(field)
    return pa.chunked_array(images, images[0].type if images else pa.binary())
