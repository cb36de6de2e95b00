"""Read the arrays, sparse matrices and tables in pickles of Python 2; nothing of them is executed.

Unpickling calls what a file names. Here every name that such files need stands for a class of this
module that only keeps what it is given; any other name is an error. NumPy gets nothing but plain
bytes, and a type and shape that were checked.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.pickled import check_nesting
from vigpipe.files.untrusted import read_bytes
from vigpipe.graphs.formats.checked import make_rows

MOST_BYTES = 256 << 20  # PubMed's largest file has 16 MB
_KINDS = "biuf"
_MOST_DIMENSIONS = 2


def read_pickle(path: Path) -> Any:
    """Read a pickle, of any protocol, of an array, a sparse matrix or a table.

    Returns a numpy array of numbers, a csr_array of float32 for scipy's csr_matrix, or numbers,
    texts, lists and dicts as Python itself writes them. InputError if the file cannot be read, has
    more than MOST_BYTES, is damaged, or needs anything else.
    """
    content = read_bytes(path, MOST_BYTES)
    try:
        check_nesting(io.BytesIO(content))
        found = _Unpickler(io.BytesIO(content), encoding="latin1").load()
        if isinstance(found, _Matrix):
            return found.as_rows(str(path))
        return found.as_array() if isinstance(found, _Array) else found
    except InputError:
        raise
    except _RefusedError as error:
        raise InputError(
            f"{path}: needs {escaped(str(error))}, and loading that would execute code from the "
            "file; fetch the data set again from where it was published"
        ) from error
    except Exception as error:  # damaged bytes end in almost any exception of pickle
        raise InputError(
            f"{path}: cannot be read as a pickle of numbers ({escaped(str(error))}); it is damaged "
            "or not wholly downloaded: fetch it again"
        ) from error


class _RefusedError(Exception):
    """The file names something that is not plain data."""


class _Kept:
    """Keeps what it is made with; `__setstate__` stops a file from setting other attributes."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: object) -> None:
        raise ValueError("a type is given a state")


class _KeptWithState(_Kept):
    """Keeps the state that a file gives it, too."""

    state: Any

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Array(_KeptWithState):
    """An array of numbers, as numpy.ndarray.__reduce__ writes it."""

    def as_array(self) -> np.ndarray:
        """Make the array; ValueError and TypeError if it does not hold numbers."""
        _, shape, dtype, is_fortran, content = self.state
        if isinstance(content, _Bytes):
            content, _ = content.given
        if isinstance(content, str):  # Python 2 had no type for bytes
            content = content.encode("latin1")
        dtype = dtype.as_dtype()
        if len(shape) > _MOST_DIMENSIONS or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"an array has the shape {shape}")
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of shape {shape} has {len(content)} bytes")
        array = np.frombuffer(content, dtype).astype(dtype.newbyteorder("="))
        return array.reshape(shape, order="F" if is_fortran else "C")


class _Dtype(_KeptWithState):
    """The type of an array's numbers, as numpy.dtype.__reduce__ writes it."""

    def as_dtype(self) -> np.dtype[Any]:
        """Make the type; ValueError and TypeError if it is not one of numbers."""
        dtype = np.dtype(str(self.given[0])).newbyteorder(">" if self.state[1] == ">" else "<")
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array holds {dtype}, no numbers")
        return dtype


class _Matrix(_KeptWithState):
    """A csr_matrix, whose state is the table of its attributes."""

    def as_rows(self, where: str) -> csr_array:
        """Make the matrix; KeyError, ValueError and TypeError if it is damaged."""
        rows, columns = self.state["_shape"]
        names = ("indptr", "indices", "data")
        indptr, indices, data = (self.state[name].as_array() for name in names)
        return make_rows(indptr, indices, data, (int(rows), int(columns)), where)


class _Bytes(_Kept):
    """Bytes that Python 3 has written for Python 2: a text and `latin1`."""


class _Table(dict[Any, Any]):
    """A defaultdict, without its factory."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        raise ValueError("a table is given a state")


_NAMES = {
    ("numpy", "ndarray"): _Kept,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # since NumPy 2
    ("scipy.sparse.csr", "csr_matrix"): _Matrix,
    ("scipy.sparse._csr", "csr_matrix"): _Matrix,  # since SciPy 1.8
    ("copy_reg", "_reconstructor"): _Matrix,
    ("collections", "defaultdict"): _Table,
    ("_codecs", "encode"): _Bytes,
    ("__builtin__", "object"): _Kept,  # Python 2
    ("__builtin__", "list"): _Kept,
    ("builtins", "object"): _Kept,  # Python 3
    ("builtins", "list"): _Kept,
}


class _Unpickler(pickle.Unpickler):
    """Finds only names of `_NAMES`."""

    def find_class(self, module_name: str, global_name: str, /) -> type:
        found = _NAMES.get((module_name, global_name))
        if found is None:
            raise _RefusedError(f"{module_name}.{global_name}")
        return found
