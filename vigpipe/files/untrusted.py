"""Read small files that anybody may have written: never more than a limit, never from a pipe."""

import contextlib
import errno
import hashlib
import json
import os
import stat
import tomllib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from vigpipe.errors import InputError

CHECK = "; check the file"  # who knows better leaves it out
MOST_BYTES = 16 << 20  # largest file that is parsed at once
MOST_ROWS = 1 << 30  # bytes of the largest file with a row for every step
NOT_THE_FILES_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of which reading can fail
MOST_TOML = 1 << 15  # largest TOML file: for a key of 64 KiB of dots, tomllib takes 20 s


def check_name(path: Path | str) -> None:
    """Raise InputError for a name that no file can have or be reached by; there may be none yet."""
    with _refused(path):
        try:
            os.stat(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise


@contextlib.contextmanager
def _refused(path: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}){CHECK}") from error
    except ValueError as error:  # a zero byte in the name, or half a surrogate pair
        raise InputError(f"{path}: is not a file name ({error}); give another") from error


def opened(path: Path) -> BufferedReader:
    """Open a regular file; anything else is an InputError, and opening a pipe waits for nobody."""
    with _refused(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path}: is not a regular file; give a file")
    return os.fdopen(descriptor, "rb")


def file_digest(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a regular file; InputError if there is none."""
    with opened(path) as file, _refused(path):
        size = os.fstat(file.fileno()).st_size
        return size, hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes; anything else is an InputError."""
    with opened(path) as file, _refused(path):
        content = file.read(most + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > most:
        raise InputError(
            f"{path}: has {size} bytes, expected at most {most}; this is not such a file"
        )
    return content


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a regular file of at most `most` bytes as UTF-8 text; anything else is an InputError."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error})") from error


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Parse a regular file of at most `most` bytes as JSON, without NaN or duplicate keys."""
    text = read_text(path, most)
    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except RecursionError as error:
        raise InputError(f"{path}: is nested too deeply to be one of ours") from error
    except ValueError as error:
        raise InputError(f"{path}: is not the JSON it should be ({error})") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a regular file of at most MOST_TOML bytes as TOML; else it is an InputError."""
    text = read_text(path, MOST_TOML)
    try:
        table = tomllib.loads(text)
        str(table)  # raises ValueError for an integer with too many digits to print
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a TOML file ({error})") from error
    return table


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table for json.loads (object_pairs_hook); raise ValueError for a duplicate key."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"the key {name[:40]!r} is there twice")
        table[name] = value
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
