"""Write small data sets of noise in the formats of `vigpipe/data/formats`."""

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ["cat", "dog", "emu"]
LABELS = {"train": np.arange(12) % 3, "test": np.arange(6) % 3}


def noise(split: str, *channels: int) -> np.ndarray:
    """Images of a split, (n, 8, 8, *channels) uint8; the test images are others."""
    random = np.random.default_rng(len(split))
    return random.integers(0, 256, (len(LABELS[split]), 8, 8, *channels), dtype=np.uint8)


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
