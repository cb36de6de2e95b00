"""Write the arrays of a command to an .npz file, without pickles."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing
from vigpipe.files.outputs import told_if_unwritable

_MOST_BYTES = 1 << 31  # of an array of names


def write_arrays(
    path: Path, option: str, arrays: Mapping[str, Any], class_names: Sequence[str]
) -> None:
    """Write arrays, and the names of the classes by label; the option is for messages."""
    unwritable = told_if_unwritable(f"{option}{path}", "choose another name")
    with unwritable, replacing(path) as partial, open(partial, "wb") as file:
        np.savez(file, **arrays, class_names=texts(class_names))


def texts(names: Sequence[str]) -> np.ndarray:
    """Make an array of texts, all of which take the room of the longest."""
    num_bytes = 4 * len(names) * max(map(len, names), default=0)
    if num_bytes > _MOST_BYTES:
        raise InputError(
            f"the names of {len(names)} samples take {num_bytes} bytes in a .npz file, expected at "
            f"most {_MOST_BYTES}; give them shorter names, or predict them in parts"
        )
    return np.array(names)
