"""Read a `Data` of torch-geometric that was saved with torch.save; nothing of it is executed.

Unpickling calls what a file names. Here every name of torch-geometric that such a file needs stands
for a class that only keeps what it is given; torch's reader refuses any other name.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import opened
from vigpipe.model.weights import read_torch_zip


class _Kept:
    """Stands for a class of torch-geometric, and keeps the state of one of its objects."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _table(*_: object) -> dict[Any, Any]:
    """Stand for a defaultdict, without its factory."""
    return {}


_NAMES = (
    *("data.Data", "data.DataEdgeAttr", "data.DataTensorAttr"),
    *("storage.GlobalStorage", "storage.BaseStorage", "storage.AttrType"),
)


def read_saved_data(path: Path) -> dict[str, Any]:
    """Return what a saved Data, or the data.pt of a data set with one, has by name.

    InputError if the file is damaged, holds anything else, or several graphs.
    """
    opened(path).close()
    known: list[Any] = [(_Kept, f"torch_geometric.data.{name}") for name in _NAMES]
    known += [(_table, "collections.defaultdict"), (_Kept, "builtins.set")]
    try:
        with _no_others():
            found = read_torch_zip(path, known)
    except Exception as error:  # damaged bytes make the readers raise almost anything
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it needs {named[1]}" if named else type(error).__name__
        if not named and isinstance(error, ValueError):
            why = str(error)
        raise InputError(
            f"{path}: cannot be read as a saved Data ({escaped(why, 120)}); save one with "
            "torch.save(data, path), or its arrays with np.savez"
        ) from error
    if isinstance(found, tuple | list) and found:  # (data.to_dict(), slices, its class)
        if len(found) > 1 and isinstance(found[1], dict) and found[1]:
            raise InputError(f"{path}: holds several graphs, expected one; save one of them")
        found = found[0]
    if isinstance(found, _Kept):
        found = _mapping_of(found)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InputError(
            f"{path}: holds a {type(found).__name__}, expected a Data of torch-geometric; save it "
            "with torch.save(data, path)"
        )
    return found


@contextmanager
def _no_others() -> Iterator[None]:
    """Forget for a while which classes others allow: torch-geometric its own, once imported."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(others)


def _mapping_of(found: _Kept) -> object:
    """Return the table of a Data, which its store holds."""
    state = found.state
    store = state.get("_store") if isinstance(state, dict) else None
    of_store = store.state if isinstance(store, _Kept) else None
    return of_store.get("_mapping") if isinstance(of_store, dict) else None
