"""The files of a prepared folder, mapped into memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock

import numpy as np
from safetensors import safe_open

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import file_digest
from vigpipe.graphs.graph import are_rows
from vigpipe.graphs.prepared.manifest import FileFacts

Arrays = dict[str, np.ndarray]
_ADVICE = "copy it again, or prepare the folder anew"


class Files:
    """The files of a folder; each must be what its facts say before anything in it is used."""

    def __init__(self, folder: Path, facts: Mapping[str, FileFacts]) -> None:
        self._folder, self._facts = folder, facts
        self._read: dict[str, Arrays] = {}
        self._lock = Lock()  # a thread may read ahead

    def arrays(self, name: str, check: Callable[[Arrays], object]) -> Arrays:
        """Return the arrays of a file, whose pages are read when they are looked at.

        InputError if it is not what it must be, or `check` raises KeyError or ValueError at first,
        or an InputError of its own.
        """
        with self._lock:
            if name not in self._read:
                arrays = self._mapped(name)
                try:
                    check(arrays)
                except InputError:
                    raise
                except (KeyError, ValueError) as error:
                    raise InputError(
                        f"{self.path(name)}: {escaped(str(error))}; {_ADVICE}"
                    ) from error
                self._read[name] = arrays
            return self._read[name]

    def path(self, name: str) -> Path:
        return self._folder / name

    def checked(self, name: str) -> Path:
        """Return the path of a file; InputError if it is not what the manifest says of it."""
        path, facts = self.path(name), self._facts[name]
        size, found = file_digest(path)
        if size != facts.bytes:
            raise InputError(
                f"{path}: has {size} bytes, but the manifest says {facts.bytes}; {_ADVICE}"
            )
        if found != facts.sha256:
            raise InputError(
                f"{path}: has the SHA-256 {found[:12]}…, but the manifest says "
                f"{facts.sha256[:12]}…; {_ADVICE}"
            )
        return path

    def _mapped(self, name: str) -> Arrays:
        path = self.checked(name)
        try:
            # safetensors maps the file for torch; for NumPy it would read all of it.
            with safe_open(path, "pt") as tensors:
                return {key: tensors.get_tensor(key).numpy() for key in tensors.keys()}  # noqa: SIM118
        except Exception as error:  # damaged bytes end in almost any exception of safetensors
            raise InputError(f"{path}: is not a safetensors file of arrays; {_ADVICE}") from error


def array(arrays: Arrays, name: str, dtype: type[np.generic], *shape: int) -> np.ndarray:
    """Return an array; KeyError without one, ValueError if it has another type or shape."""
    found = arrays[name]
    if found.dtype != dtype or found.shape != shape:
        expected = f"{np.dtype(dtype)} of shape {shape}"
        raise ValueError(f"{name} is {found.dtype} of shape {found.shape}, expected {expected}")
    return found


def numbers(
    arrays: Arrays, name: str, dtype: type[np.generic], length: int, least: int, end: int
) -> np.ndarray:
    """Return an array of numbers from `least` to `end` - 1; errors are those of `array`."""
    found = array(arrays, name, dtype, length)
    if length and (found.min() < least or found.max() >= end):
        raise ValueError(f"{name} are not all in {least} … {end - 1}")
    return found


def check_rows(arrays: Arrays, dtype: type[np.generic], length: int, last: int) -> None:
    """Check that `indptr` begins at 0, ascends, and ends at `last`; errors are those of `array`."""
    if not are_rows(array(arrays, "indptr", dtype, length), last):
        raise ValueError(f"indptr does not ascend from 0 to {last}")
