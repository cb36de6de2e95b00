"""Read images out of tar files, each at its position."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vigpipe.data.images import LARGEST_BYTES, decode
from vigpipe.data.tars.index import Stamp, read_stamp
from vigpipe.data.texts import Texts
from vigpipe.errors import InputError, UnreadableImage
from vigpipe.files.untrusted import NOT_THE_FILES_FAULT

MOST_OPEN = 64  # The usual limit of open files is 1,024 for a process.


@dataclass(frozen=True)
class LoadFromTars:
    """Reads the images of a split, each at its offset in one of the tars."""

    tars: "OpenTars"
    tar_of: np.ndarray  # (n,) int32
    offsets: np.ndarray  # (n,) int64
    sizes: np.ndarray  # (n,) int64
    names: Texts

    def __call__(self, index: int) -> Image.Image:
        name, size = self.name_of(index), int(self.sizes[index])
        if size > LARGEST_BYTES:
            raise UnreadableImage(
                f"{name}: has {size} bytes, but an image has at most {LARGEST_BYTES}; remove it"
            )
        tar, offset = int(self.tar_of[index]), int(self.offsets[index])
        return decode(self.tars.read(tar, offset, size, name), name)

    def name_of(self, index: int) -> str:
        return f"{self.tars.paths[self.tar_of[index]]}: {self.names[index]}"

    def marks(self) -> Iterable[bytes]:
        yield from (self.names.content, self.names.ends.tobytes(), self.sizes.tobytes())


class OpenTars:
    """Tar files, known by their stamps: those used last stay open, and any thread may read them."""

    def __init__(self, paths: Sequence[Path], stamps: Sequence[Stamp]) -> None:
        self.paths, self._stamps = tuple(paths), tuple(stamps)
        self._descriptor = lru_cache(MOST_OPEN)(_Descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenTars, (self.paths, self._stamps)

    def read(self, tar: int, offset: int, size: int, name: str) -> bytes:
        """Read bytes of a tar; that it has changed is an InputError, which begins with the name."""
        try:
            descriptor = self._descriptor(self.paths[tar])  # It stays open while this refers to it.
            content = os.pread(descriptor.number, size, offset)
            is_same = read_stamp(descriptor.number) == self._stamps[tar]
        except OSError as error:
            if error.errno in NOT_THE_FILES_FAULT:  # such as too many open files
                raise
            raise InputError(
                f"{name}: cannot be read ({error.strerror}); the tar was readable at the start"
            ) from error
        if len(content) < size or not is_same:
            raise InputError(
                f"{name}: the tar has changed since its images were listed ({len(content)} of "
                f"{size} bytes were read); start the run again"
            )
        return content


class _Descriptor:
    """An open file, closed when nobody refers to it: another thread may still read from it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)
