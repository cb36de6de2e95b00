"""Tell what a pickle would do by reading its instructions; nothing is loaded."""

import io
import os
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import IO

from vigpipe.files.names import escaped

# What a file of weights holds is named at its beginning, but torch's legacy files have pickles of a
# magic number, a version and facts about the system before it.
_MOST_BYTES, NUM_PICKLES = 1 << 20, 5
_MOST_DEPTH = 1000  # modules within modules have 4 for each level
_ADDING = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
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


def check_nesting(file: IO[bytes], num_pickles: int = 1) -> None:
    """Raise ValueError for pickles that would make a reader nest, or allocate, without limit.

    It follows how deep each object is nested that the instructions put onto the stack: tuples that
    hold one another a hundred thousand times end the process when they are compared or hashed. A
    list or a table that is taken from the memo counts as deep as it was when it was put there; no
    reader of ours compares those, and Python does not hash them.
    """
    for _ in range(num_pickles):
        _check_nesting(file)
        if not file.read(1):  # there are fewer
            return
        file.seek(-1, os.SEEK_CUR)


def _check_nesting(file: IO[bytes]) -> None:
    stack: list[int | None] = []  # the depths of what is on it; None is a mark
    memo: dict[int, int] = {}

    def popped(number: int) -> list[int]:
        taken = [stack.pop() for _ in range(number)][::-1]
        return [depth for depth in taken if depth is not None]

    for code, value, position in pickletools.genops(file):
        if code.name.endswith("PUT") or code.name == "MEMOIZE":
            number = len(memo) if code.name == "MEMOIZE" else int(value or 0)
            if number > (position or 0):
                raise ValueError("it remembers more than it holds")
            memo[number] = stack[-1] or 0
            continue
        if code.name.endswith("GET"):
            stack.append(memo[int(value or 0)])
            continue
        if code.name == "DUP":
            stack.append(stack[-1])
            continue
        taken: list[int] = []
        before = code.stack_before
        if pickletools.markobject in before:
            while (depth := stack.pop()) is not None:
                taken.append(depth)
            before = before[: before.index(pickletools.markobject)]
        held = popped(len(before))
        if code.name in _ADDING:  # the first one stays, and holds the others
            depth = max(held[0], 1 + max([*held[1:], *taken], default=0))
        else:
            depth = 1 + max([*held, *taken], default=-1)
        if depth > _MOST_DEPTH:
            raise ValueError(f"it nests more than {_MOST_DEPTH} objects in one another")
        is_mark = code.stack_after == [pickletools.markobject]
        stack += [None] if is_mark else [depth] * len(code.stack_after)


def _first_import(content: io.BytesIO) -> str | None:
    for _ in range(NUM_PICKLES):
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
