"""Keep in files, between runs, what is made of a graph, since that can take minutes.

A file is named after all that its content depends on. It is beside the graph, where other users of
the graph find it too, or else in the user's cache. What is read is checked; a damaged file is told
and made again. If no file can be written, the run goes on without.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load, save

from vigpipe.errors import InputError
from vigpipe.files.cache import cache_folder
from vigpipe.files.untrusted import read_bytes
from vigpipe.messages import tell

_MOST_HEADER = 1 << 16  # bytes before the numbers

Arrays = Mapping[str, np.ndarray]


class Form(NamedTuple):
    """What a file must hold."""

    what: str  # for the user, such as "3 parts of 60 nodes"
    like: Mapping[str, tuple[type[np.generic], tuple[int, ...]]]  # dtype and shape of every array
    is_right: Callable[[Arrays], bool]  # whether numbers in arrays of these shapes can be right


class Kept(NamedTuple):
    """The arrays of a file, not to be changed, and the time to make them, and to read them."""

    arrays: Arrays
    seconds: float
    read_seconds: float


def read_kept(name: str, beside: Path | None, form: Form) -> Kept | None:
    """Read what an earlier process has kept under a name; None if no file is there and right.

    `beside` is the graph's file or folder, None for a graph without one. Files are in
    <beside>.parts/, or in the user's cache where that cannot be written.
    """
    found = (_read(path, form) for path in _paths(name, beside))
    return next(filter(None, found), None)


def keep(
    name: str, beside: Path | None, form: Form, arrays: Arrays, seconds: float
) -> float | None:
    """Write a file for `read_kept`, with how many seconds it took to make its arrays.

    Ranks may do so at the same time, with the same content. Returns how long it took to read the
    file again, as other ranks do; None if it cannot be written.
    """
    for path in _paths(name, beside):
        with contextlib.suppress(OSError):
            _write(path, {**arrays, "seconds": np.array([seconds])})
            found = _read(path, form)
            return None if found is None else found.read_seconds
    return None


def _paths(name: str, beside: Path | None) -> Iterator[Path]:
    if beside is not None:
        yield Path(f"{beside.absolute()}.parts") / f"{name}.safetensors"
    with contextlib.suppress(OSError):  # the user has none
        yield cache_folder() / "parts" / f"{name}.safetensors"


def _read(path: Path, form: Form) -> Kept | None:
    began = time.perf_counter()
    if not os.path.exists(path):  # Path.exists raises in a folder that may not be searched
        return None
    num_bytes = sum(
        np.dtype(dtype).itemsize * np.prod(shape) for dtype, shape in form.like.values()
    )
    try:
        arrays = load(read_bytes(path, int(num_bytes) + _MOST_HEADER))
        seconds = float(arrays["seconds"].item())
    except InputError as error:
        tell(f"{error}; they are made again")
        return None
    except Exception as error:  # damaged bytes end in almost any exception of safetensors
        tell(f"{path}: does not hold {form.what} ({error!r}); they are made again")
        return None
    is_like = all(
        name in arrays and arrays[name].dtype == dtype and arrays[name].shape == shape
        for name, (dtype, shape) in form.like.items()
    )
    if not is_like or not form.is_right(arrays) or not 0 <= seconds < 1e9:
        tell(f"{path}: does not hold {form.what}; they are made again")
        return None
    return Kept(arrays, seconds, time.perf_counter() - began)


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file whole or not at all; OSError if it cannot be written."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        partial.write_bytes(save(arrays))
        partial.replace(path)
