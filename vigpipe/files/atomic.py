"""Write files and folders whole or not at all, and nothing of others: under a name drawn by chance.

A crash leaves the old file or the new one, never half of it, and at most a hidden file beside it,
which the next writer there removes. Whoever may write in the folder can put a link or a pipe under
a name that he can guess.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTIAL = re.compile(r"\.vigpipe-[0-9a-f]{16}\.partial")
_swept: set[Path] = set()  # folders where this process has looked for what others have left


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden file to write: it replaces `path` at the end, or goes after an exception."""
    with _given_name(*_locked(path, _new_file), path) as partial:
        yield partial


@contextlib.contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder: it gets its name, which is free, at the end, or goes."""
    with _given_name(*_locked(folder, _new_folder), folder) as partial:
        yield partial


def _new_file(partial: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(partial, flags, 0o666)


def _new_folder(partial: Path) -> int:
    partial.mkdir()
    return os.open(partial, os.O_RDONLY | os.O_CLOEXEC)


def _locked(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Make something hidden beside a path, with a lock for as long as its descriptor is open."""
    while True:
        partial = _new_name(path)
        descriptor = make(partial)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if partial.exists():
            return partial, descriptor
        os.close(descriptor)  # a sweeper has been quicker


def _new_name(path: Path) -> Path:
    """Draw a name beside a path, and remove what writers that were killed have left there."""
    folder = path.parent
    if folder not in _swept:
        _swept.add(folder)
        with contextlib.suppress(OSError):
            left = [entry.path for entry in os.scandir(folder) if _PARTIAL.fullmatch(entry.name)]
            for name in left:
                _remove_if_left(name)
    return folder / f".vigpipe-{secrets.token_hex(8)}.partial"


@contextlib.contextmanager
def _given_name(partial: Path, descriptor: int, path: Path) -> Iterator[Path]:
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        _remove(partial)
        raise
    finally:
        os.close(descriptor)


def _remove_if_left(partial: str) -> None:
    """Remove a hidden file or folder if it is this user's, and its writer lives no more."""
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(partial, flags)  # also a folder, which `open` refuses
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.geteuid():
                _remove(Path(partial))
        finally:
            os.close(descriptor)


def _remove(partial: Path) -> None:
    with contextlib.suppress(OSError):
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink()


def sync(path: Path) -> None:
    """Force a file or a folder to disk; OSError if a file cannot be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a text as UTF-8, replacing the file atomically; an OSError leaves the old one."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def save_figure(figure: "Figure", path: Path, made_by: str, **options: Any) -> None:
    """Save a picture as .png, .pdf or .svg, replacing the file atomically."""
    suffix = path.suffix.lower()
    # It names the command that made it, so that this command may replace it (`files.outputs`).
    metadata = {"Software" if suffix == ".png" else "Creator": made_by}
    with replacing(path) as partial:
        figure.savefig(partial, format=suffix[1:], metadata=metadata, **options)
