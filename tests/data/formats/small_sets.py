"""Write small data sets of noise in the formats of `vigpipe/data/formats`."""

import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vigpipe.data.picture import to_array
from vigpipe.data.stored import Stored

NAMES = ["cat", "dog", "emu"]
LABELS = {"train": np.arange(12) % 3, "test": np.arange(6) % 3}


def noise(split: str, *channels: int) -> np.ndarray:
    """Images of a split, (n, 8, 8, *channels) uint8; the test images are others."""
    random = np.random.default_rng(len(split))
    return random.integers(0, 256, (len(LABELS[split]), 8, 8, *channels), dtype=np.uint8)


def check_images(stored: Stored, *channels: int) -> None:
    """Compare the labels and pixels that were read with those of the splits."""
    for split, images in stored.splits.items():
        assert images.labels.dtype == np.int64
        np.testing.assert_array_equal(images.labels, LABELS[split])
        loaded = np.stack([to_array(images.load(i)) for i in range(len(images))])
        np.testing.assert_array_equal(loaded, noise(split, *channels).reshape(loaded.shape))


# ---- arrays ---------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    """A file of MNIST's format."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, dot: str = "-", packed: bool = False) -> Path:
    """Grey images and their labels, in MNIST's four files."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, stem in (("train", "train"), ("test", "t10k")):
        for name, array in (("images", noise(split)), ("labels", LABELS[split])):
            content = idx(array)
            path = folder / f"{stem}-{name}{dot}idx{array.ndim}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder


def keras_arrays(*channels: int) -> dict[str, np.ndarray]:
    """The arrays of a .npz file with Keras' names."""
    return {
        "x_train": noise("train", *channels),
        "y_train": LABELS["train"],
        "x_test": noise("test", *channels),
        "y_test": LABELS["test"],
    }


def write_npz(path: Path, arrays: dict[str, np.ndarray], packed: bool = False) -> Path:
    save: Any = np.savez_compressed if packed else np.savez  # their types take no arrays by name
    save(path, **arrays)
    return path


# ---- tables ---------------------------------------------------------------------------------


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def features(names: list[str] | None = NAMES) -> dict:
    """Hugging Face's description of the columns."""
    label = {"dtype": "int64", "_type": "Value"}
    if names is not None:
        label = {"names": names, "_type": "ClassLabel"}
    return {"image": {"_type": "Image"}, "label": label}


def table(split: str, described: dict | None = None, **columns) -> pa.Table:
    """A table as datasets makes it.

    Args:
        split: train or test.
        described: the description of its columns; by default with class names.
        columns: columns that replace others or come after them.
    """
    images = [{"bytes": png(pixels), "path": None} for pixels in noise(split, 3)]
    type_ = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    made = {"image": pa.array(images, type_), "label": pa.array(LABELS[split]), **columns}
    info = {"info": {"features": features() if described is None else described}}
    return pa.table(made).replace_schema_metadata({"huggingface": json.dumps(info)})


def write_stream(path: Path, rows: pa.Table, batch: int = 5, **options) -> None:
    """An Arrow stream of several record batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(str(path), rows.schema, options=write) as stream:
        stream.write_table(rows, max_chunksize=batch)


def write_saved(folder: Path, tested: str = "test", files: int = 2, **tables: pa.Table) -> Path:
    """A folder of save_to_disk.

    Args:
        folder: where.
        tested: name of the test split.
        files: number of files of a split.
        tables: train and test, instead of `table`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", tested]}))
    for split, name in (("train", "train"), ("test", tested)):
        rows = tables[split] if split in tables else table(split)
        paths = [folder / name / f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
        step = -(-len(rows) // files)
        for i, path in enumerate(paths):
            write_stream(path, rows.slice(i * step, step))
        state = {"_data_files": [{"filename": path.name} for path in paths], "_split": None}
        (folder / name / "state.json").write_text(json.dumps(state))
    return folder


def write_parquet(folder: Path, layout: str = "data/{}-00000-of-00001.parquet", **tables) -> Path:
    """A folder of parquet files with row groups of five rows."""
    for split in ("train", "test"):
        path = folder / layout.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = tables[split] if split in tables else table(split)
        pq.write_table(rows, path, row_group_size=5)
    return folder
