import json
from pathlib import Path

import pyarrow as pa
import pytest

from tests.data.formats.small_sets import features, table
from tests.refusals import check_refusals
from vigpipe.data.formats.tables import check_shards, find_columns, read_labels
from vigpipe.errors import InputError

WHERE = "train.parquet"
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def schema(described: dict | None = None, **columns: pa.DataType) -> pa.Schema:
    """A schema, with Hugging Face's description of the columns if one is given."""
    metadata = {"huggingface": json.dumps({"info": {"features": described}})} if described else {}
    return pa.schema(list(columns.items()), metadata)


def found(schema: pa.Schema) -> tuple:
    columns = find_columns(schema, WHERE)  # pyrefly: ignore[bad-argument-type]
    return columns.image, columns.label, columns.class_names


def test_the_description_says_what_the_columns_are():
    assert found(table("train").schema) == ("image", "label", ("cat", "dog", "emu"))
    assert found(table("train", features(None)).schema) == ("image", "label", None)
    described = {
        "sound": {"_type": "Audio"},
        "picture": {"_type": "Image"},
        "kind": {"_type": "ClassLabel", "names": ["a", "b"]},
        "label": {"_type": "Value"},
    }
    types = {"sound": IMAGE, "picture": IMAGE, "kind": pa.int64(), "label": pa.int64()}
    assert found(schema(described, **types)) == ("picture", "kind", ("a", "b"))


def test_without_a_description_the_types_and_usual_names_say_it():
    types = {"id": pa.int64(), "img": IMAGE, "labels": pa.uint8()}
    assert found(schema(None, **types)) == ("img", "labels", None)


def test_of_several_the_one_with_the_usual_name_is_taken():
    described = {name: {"_type": "ClassLabel", "names": ["a"]} for name in ("group", "label")}
    types = {"image": IMAGE, "mask": IMAGE, "group": pa.int64(), "label": pa.int64()}
    assert found(schema(described, **types)) == ("image", "label", ("a",))


def test_a_text_that_many_rows_have_is_one_text():
    """A small parquet file may repeat a long one a million times."""
    chunks = [pa.array(texts).dictionary_encode() for texts in (["b", "a", "b"], ["c"])]
    labels = read_labels(pa.chunked_array(chunks), Path(WHERE))
    assert labels.tolist() == ["b", "a", "b", "c"]
    assert labels[0] is labels[2]
    absent = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    with pytest.raises(InputError, match="1 of 2 rows have no label"):
        read_labels(pa.chunked_array([absent]), Path(WHERE))


CLASSES = {"_type": "ClassLabel", "names": ["a"]}
COARSE = {"fine_label": pa.int64(), "coarse_label": pa.int64()}
LISTS = {"image": pa.list_(pa.uint8()), "label": pa.int64()}


def described(text: str) -> pa.Schema:
    return pa.schema([("image", IMAGE)], {"huggingface": text})


REFUSED = [
    (
        schema(dict.fromkeys(COARSE, CLASSES), img=IMAGE, **COARSE),
        "several columns where .* is expected: fine_label, coarse_label; drop the others",
    ),
    (
        schema(None, left=IMAGE, right=IMAGE, label=pa.int64()),
        "several columns where one column of encoded images, .* left, right; drop",
    ),
    (
        schema(None, image=IMAGE, kind=pa.int64()),
        "has no column of class labels, .* among its columns image, kind",
    ),
    (schema(None, **LISTS), "has no column of encoded images, .* among its columns image, label"),
    (
        schema({"image": {"_type": "Image"}}, **LISTS),
        r"image has the type list<.*, expected encoded images .* datasets\.Image\(\)",
    ),
    (
        schema(None, image=IMAGE, label=pa.float32()),
        r"label has the type float, .* class_encode_column\('label'\)",
    ),
    (
        pa.schema([("image", IMAGE), ("label", pa.int8()), ("label", pa.int8())]),
        "two columns have the same name",
    ),
    (
        schema({"label": {"_type": "ClassLabel", "names": "ab"}}, image=IMAGE, label=pa.int64()),
        "class names are not a list of texts",
    ),
    (schema(None, **{"a\n\x1b[2J": pa.int64()}), r"among its columns a\\n\\x1b\[2J;"),
    (described("{"), "JSONDecodeError"),
    (described('{"info": {"features": []}}'), "TypeError"),
    (described("[" * 100_000), "RecursionError"),
]


def test_columns_that_do_not_fit_are_told_in_one_sentence():
    check_refusals(REFUSED, found)


def test_a_missing_file_is_noticed_by_the_names_of_the_others(tmp_path):
    for names in (
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["train-00000-of-00001-3f1a.parquet"],
        ["0000.parquet", "0001.parquet"],
        ["train-of.parquet"],
    ):
        check_shards([tmp_path / name for name in names])
    with pytest.raises(InputError, match="is one of 2 files by its name, but 1 are there"):
        check_shards([tmp_path / "train-00000-of-00002.parquet"])
