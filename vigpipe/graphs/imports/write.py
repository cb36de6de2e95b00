"""Write a graph file, of which the features may come some rows at a time."""

import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.lib import format as npy

from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing

Found = TypeVar("Found")


def write_graph_file(
    out: Path,
    arrays: Mapping[str, np.ndarray],
    check: Callable[[Path], Found],
    rows: tuple[tuple[int, int], Iterable[np.ndarray]] | None = None,
) -> Found:
    """Write arrays as np.savez does, whole or not at all; InputError if that fails.

    The `rows` of float32 features, of this shape, become the array `x`. `check` looks at the file
    before it gets its name; what it returns is returned.
    """
    try:
        with replacing(out) as partial:
            with zipfile.ZipFile(partial, "w") as archive:
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                        npy.write_array(file, array, allow_pickle=False)
                if rows is not None:
                    shape, chunks = rows
                    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    with archive.open("x.npy", "w", force_zip64=True) as file:
                        npy.write_array_header_1_0(file, header)
                        for chunk in chunks:
                            file.write(np.ascontiguousarray(chunk, "<f4").data.cast("B"))
            return check(partial)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
