"""Where a command may write: nothing that is there already is replaced unless it is our own.

A file is written where there is none, over a regular file that the same command wrote before, which
carries the command's mark, or over any regular file if the user said --overwrite. A folder must
have none of the names that the command writes into it. Nothing but regular files is ever replaced.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.files.untrusted import read_bytes

MOST_MARKED_BYTES = 1 << 28  # largest file in which a mark is looked for
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def told_if_unwritable(place: str, advice: str) -> Iterator[None]:
    """Turn an OSError of this context into an InputError: the place cannot be written."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{place}: cannot be written ({why}); {advice}") from error


def check_new_file(
    path: Path, option: str, suffixes: Sequence[str], *, mark: str = "", overwrite: bool | None
) -> None:
    """Check that a command may write a file, and make its folder; call this before the work for it.

    Anything that is in the way is an InputError. The option, with a space behind it, is that which
    names the file, for messages. Every file of this command has the mark; without one no file
    counts as its own. `overwrite` is None if the command does not have --overwrite.
    """
    if path.suffix.lower() not in suffixes:
        raise InputError(
            f"{option}{path}: must end in {' or '.join(suffixes)}, but "
            f"{'ends in ' + repr(path.suffix) if path.suffix else 'has no ending'}; choose another "
            "name"
        )
    with told_if_unwritable(f"{option}{path}", "choose another name"):
        mode = _mode(path)
        if mode is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
    _check_regular(path, mode, option)
    if overwrite or (mark and mark.encode() in read_bytes(path, MOST_MARKED_BYTES)):
        return
    whose = ", and this command did not write it" if mark else ""
    advice = " or add --overwrite" if overwrite is False else ""
    raise InputError(f"{option}{path}: is there already{whose}; choose another name{advice}")


def check_converted_file(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise InputError unless a weights file may be written of another one."""
    if source.exists() and target.exists() and source.samefile(target):
        raise InputError(f"{target}: is the file to convert itself; choose another name")
    check_new_file(target, "", (".safetensors",), overwrite=overwrite)


def check_new_folder(folder: Path) -> None:
    """Make the parent of a new folder; refuse one that is there, or cannot be made there."""
    if os.path.lexists(folder):
        raise InputError(f"{folder}: is there already; choose another name, or remove it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error
    if not os.access(folder.parent, os.W_OK):
        raise InputError(f"{folder}: cannot be written, because {folder.parent} may not be")


def check_new_names(folder: Path, names: Sequence[str], advice: str) -> None:
    """Refuse a folder, if there is one, with a name that a command is about to write there."""
    for name in names:
        if _mode(folder / name) is not None:
            raise InputError(f"--out {folder}: holds {name} already; {advice}")


def check_replaceable(folder: Path, names: Sequence[str]) -> None:
    """Refuse a folder in which what a run is to write again is a folder, link, pipe or device."""
    for name in names:
        mode = _mode(folder / name)
        if mode is not None:
            _check_regular(folder / name, mode, "--out ")


def _mode(path: Path) -> int | None:
    """Return the mode of what is there, without following a link; None if nothing is."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None


def _check_regular(path: Path, mode: int, option: str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
        raise InputError(
            f"{option}{path}: is {kind}, where a file is to be written; choose another name"
        )
