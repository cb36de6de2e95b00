"""Follow metrics.jsonl while another process writes it."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vigpipe.errors import InputError
from vigpipe.files.rows import parse_row
from vigpipe.files.untrusted import opened
from vigpipe.run.folder import METRICS


def parse_rows(content: bytes) -> list[dict[str, Any]]:
    """Parse the complete lines of metrics.jsonl."""
    return [parse_row(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def step_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of optimizer steps."""
    return [row for row in rows if "step" in row and "event" not in row]


class RowFollower:
    """Reads the rows of a run that goes on; rows that the file holds already are not new.

    A resumed run replaces the file: lines up to its checkpoint stay as they are, and are not new.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._num_read = 0, 0
        self._lines: list[bytes] = []  # lines read so far
        self._next_line = 0
        self.read_new()

    def read_new(self) -> list[dict[str, Any]]:
        """Return the rows written since the last call; a line that is not complete waits."""
        try:
            with opened(self._path) as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._num_read, self._next_line = inode, 0, 0
                file.seek(self._num_read)
                content = file.read()
        except InputError:  # there is none, or somebody else's, which the run refuses
            return []
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        self._num_read += sum(map(len, lines))
        new: list[bytes] = []
        for line in lines:
            if self._lines[self._next_line : self._next_line + 1] != [line]:
                del self._lines[self._next_line :]
                self._lines.append(line)
                new.append(line)
            self._next_line += 1
        return parse_rows(b"".join(new))


def last_step(folder: Path) -> int:
    """Return the last step in metrics.jsonl; 0 before there is one."""
    try:
        with opened(folder / METRICS) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2000))
            lines = file.read().splitlines()[1 if size > 2000 else 0 :]
    except (OSError, InputError):
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            row = parse_row(line)
            if "step" in row and "event" not in row:
                return row["step"]
    return 0
