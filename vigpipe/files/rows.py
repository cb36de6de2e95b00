"""Append rows of JSON to a file, one a line, while a run goes on."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def as_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as it stands in a file."""
    return json.dumps(row).encode() + b"\n"


def parse_row(line: bytes) -> Any:
    """Return what stands in a line of such a file, or raise ValueError."""
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class RowsFile:
    """A file of rows that grows; those that an OSError refuses are kept, and written later."""

    def __init__(self, path: Path) -> None:
        self._path, self._unwritten = path, b""
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, _FLAGS, 0o666)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; the kernel has them when this returns. A closed file is opened again."""
        if self._file < 0:
            self._open()
        self._unwritten += b"".join(map(as_line, rows))
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]

    def sync(self) -> int:
        """Force the rows to disk, and return the size of the file in bytes."""
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        return os.fstat(self._file).st_size

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def finish(self) -> None:
        """Close the file, with the rows that are left."""
        self.close()
        if self._unwritten:
            with open(os.open(self._path, _FLAGS, 0o666), "ab") as file:
                file.write(self._unwritten)
            self._unwritten = b""
