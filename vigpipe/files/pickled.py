"""Name what a pickle would import and call, by reading its instructions; nothing is loaded."""

import io
import pickletools
import warnings
import zipfile
from pathlib import Path

from vigpipe.files.names import escaped

# What a file of weights holds is named at its beginning, but torch's legacy files have pickles of a
# magic number, a version and facts about the system before it.
_MOST_BYTES, _MOST_PICKLES = 1 << 20, 5
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
# What pickles of NumPy's numbers and arrays name; `model.weights` makes none of them.
OF_NUMPY = (
    *("numpy.dtype", "numpy.ndarray"),
    *(f"numpy.{c}.multiarray.{f}" for c in ("core", "_core") for f in ("scalar", "_reconstruct")),
)
# torch's own reader allows these.
_HARMLESS = (
    *("collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "argparse.Namespace"),
    *("_codecs.encode", *OF_NUMPY),
)


def imported_by(path: Path) -> str | None:
    """Name what a file would import first when it is unpickled, such as posix.system, if anything.

    It is a pickle of any protocol, several behind one another, torch's zip file of one, or none.
    """
    content = _content(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickletools warns of faulty instructions.
        return _first_import(content)


def _first_import(content: io.BytesIO) -> str | None:
    for _ in range(_MOST_PICKLES):
        strings: list[str] = []
        found: str | None = None
        try:
            for instruction, value, _ in pickletools.genops(content):
                name = instruction.name
                if name in _STRINGS:
                    strings.append(str(value))
                elif name in ("GLOBAL", "INST"):
                    found = found or _unless_harmless(str(value).replace(" ", "."))
                elif name == "STACK_GLOBAL":
                    found = found or _unless_harmless(".".join(strings[-2:]))
        except ValueError:  # it is cut off, or no pickle
            return found if content.tell() == _MOST_BYTES else None
        if found:
            return found
    return None


def _unless_harmless(name: str) -> str | None:
    is_storage = name.startswith("torch.") and name.endswith("Storage")
    return None if name in _HARMLESS or is_storage else escaped(name)


def _content(path: Path) -> io.BytesIO:
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            with archive.open(name) as file:
                return io.BytesIO(file.read(_MOST_BYTES))
    except Exception:  # damaged bytes end in almost any exception of zipfile
        with path.open("rb") as file:
            return io.BytesIO(file.read(_MOST_BYTES))
