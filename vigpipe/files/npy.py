"""Read NumPy's .npy and .npz files that anybody may have written; nothing in them is unpickled.

Before memory is taken for an array, its header is compared with the number of bytes that are there:
a header can say any shape, and a small zip file can unpack to any size.
"""

import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import opened

MOST_UNPACKED = 2 << 30  # bytes of the compressed arrays of a file, once they are unpacked
# What is counted of them at least: most numbers become int64, and texts objects of Python.
_LEAST_OF_A_NUMBER, _LEAST_OF_A_TEXT = 4, 64
MOST_HEADER_BYTES = 1 << 14  # NumPy's own reader takes 10,000 bytes of an array's header
_MOST_DIRECTORY_BYTES = 1 << 20  # zipfile parses the whole list of a zip file's members
_PIECE = 1 << 20  # bytes that are unpacked at once
_LAST_CODE_POINT = 0x10FFFF
_KINDS = "biufSU"  # NumPy's letters for truth values, numbers and text


def read_npz(
    path: Path, required: Sequence[str], optional: Sequence[str] = (), mapped: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Read arrays of numbers or text from a .npz file; other arrays in it are left alone.

    Returns the required ones, and those optional ones that are there, by name, in the machine's
    byte order. Those in `mapped` are mapped into memory, if they are numbers as memory has them,
    row by row and not compressed; they may not be aligned. Anything else in them, damage, and more
    than MOST_UNPACKED bytes once unpacked are an InputError.
    """
    with opened_archive(path) as archive:
        members = members_of(archive, path)
        missing = [name for name in required if name not in members]
        if missing:
            found = escaped(", ".join(sorted(members)) or "none")
            raise InputError(
                f"{path}: has the arrays {found}, but lacks {', '.join(missing)}; save it again "
                "with all of them"
            )
        wanted = [members[name] for name in (*required, *optional) if name in members]
        packed = [info for info in wanted if info.compress_type != zipfile.ZIP_STORED]
        num_bytes = sum(_bytes_unpacked(archive, info) for info in packed)
        if num_bytes > MOST_UNPACKED:
            raise InputError(
                f"{path}: its compressed arrays have {num_bytes} bytes, where a number counts as "
                f"{_LEAST_OF_A_NUMBER} at least and a text as {_LEAST_OF_A_TEXT}, at most "
                f"{MOST_UNPACKED} are unpacked into memory; save it without compression, "
                "np.savez('new.npz', **np.load('old.npz'))"
            )
        return {_name(i): _read_member(archive, i, path, _name(i) in mapped) for i in wanted}


def read_npy(path: Path, *, mapped: bool = False) -> np.ndarray:
    """Read an array of numbers or text from a .npy file, or map it, as `read_npz` does."""
    with opened(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            found = _map_array(path, 0, size, None) if mapped else None
            return _read_array(file, size, f"{path}: its array") if found is None else found
        except InputError:
            raise
        except (EOFError, ValueError, OSError) as error:
            raise _damaged(path, "npy", error) from error


class _InPieces(BufferedReader):
    """A file of which zipfile cannot read an endless list of members at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MOST_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"{size} bytes are read at once, as for a list of members")
        return super().read(size)


@contextmanager
def opened_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a .npz file; whatever damage does is an InputError, and too little memory an error."""
    with opened(path) as plain:
        try:
            with _InPieces(plain.raw) as file, zipfile.ZipFile(file) as archive:
                yield archive
        except (InputError, MemoryError):
            raise
        except Exception as error:  # damaged bytes end in almost any exception of zipfile
            raise _damaged(path, "npz", error) from error


def _damaged(path: Path, kind: str, error: Exception) -> InputError:
    return InputError(
        f"{path}: cannot be read as a .{kind} file ({escaped(str(error))}); it is damaged or not "
        "wholly downloaded: fetch or save it again"
    )


def names_in(path: Path) -> list[str]:
    """List the names of the arrays in a .npz file; errors are those of `opened_archive`."""
    with opened_archive(path) as archive:
        return sorted(members_of(archive, path))


def members_of(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """List the arrays of a .npz file by name; two of a name are an InputError."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = _name(info)
        if name in members:
            raise InputError(f"{path}: has two arrays {escaped(name)}; save it again with one")
        if name != info.filename:
            members[name] = info
    return members


def _name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _bytes_unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    check_compression(info)
    with archive.open(info) as stream:
        shape, _, dtype, _ = read_header(stream.read(MOST_HEADER_BYTES))
    least = _LEAST_OF_A_TEXT if dtype.kind in "SU" else _LEAST_OF_A_NUMBER
    return max(info.file_size, least * min(math.prod(shape), info.file_size))


def check_compression(info: zipfile.ZipInfo) -> None:
    """Raise ValueError if an array is compressed in a way of which NumPy knows nothing."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} is compressed in a way that NumPy does not use")


def start_of(info: zipfile.ZipInfo, path: Path) -> int:
    """Find where in the file a member's own bytes begin, behind its local header."""
    fixed = struct.Struct("<26xHH")  # APPNOTE.TXT, 4.3.7: lengths of the name and the extra field
    with opened(path) as file:
        file.seek(info.header_offset)
        return info.header_offset + fixed.size + sum(fixed.unpack(file.read(fixed.size)))


def _read_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, is_mapped: bool
) -> np.ndarray:
    if info.compress_type == zipfile.ZIP_STORED:
        if info.file_size > path.stat().st_size:
            raise ValueError(f"{info.filename} is not wholly there")
        if is_mapped and info.compress_size == info.file_size:
            found = _map_array(path, start_of(info, path), info.file_size, info.CRC)
            if found is not None:
                return found
    with archive.open(info) as stream:
        return _read_array(stream, info.file_size, f"{path}: {_name(info)}")


def _read_array(stream: IO[bytes], num_bytes: int, where: str) -> np.ndarray:
    """Read a .npy file of a known size; damage to it is an EOFError or a ValueError."""
    head = stream.read(MOST_HEADER_BYTES)
    shape, is_fortran, dtype, offset = read_header(head)
    if dtype.kind not in _KINDS or dtype.subdtype is not None:
        raise InputError(
            f"{where} holds {'Python objects' if dtype.hasobject else escaped(str(dtype))}, "
            "expected numbers or text; save it again as an array of numbers or, for names, of "
            "dtype=str"
        )
    size = math.prod(shape) * dtype.itemsize
    if dtype.itemsize < 1 or min(shape, default=0) < 0 or num_bytes != offset + size:
        raise ValueError(
            f"an array has {num_bytes} bytes, but its header says {shape} of {dtype.str}"
        )
    try:
        content = np.empty(size, np.uint8)
    except MemoryError as error:
        raise InputError(
            f"{where} needs {size} bytes of memory, which are not there; see whether it is as "
            "large as it should be, and if so take a larger machine"
        ) from error
    start = np.frombuffer(head[offset:], np.uint8)
    content[: len(start)] = start
    if missing := fill(content.data[len(start) :], stream):
        raise EOFError(f"{missing} of {size} bytes are missing")
    if stream.read(1):  # At the end of a member zipfile compares its checksum.
        raise ValueError("there are more bytes than numbers")
    if is_fortran:
        return _as_array(content, shape[::-1], dtype).T
    return _as_array(content, shape, dtype)


def fill(memory: memoryview, stream: IO[bytes]) -> int:
    """Read bytes into memory, piece by piece, and return how many are missing in the stream."""
    while memory:
        piece = stream.readinto(memory[:_PIECE])  # pyrefly: ignore[missing-attribute]
        if not piece:
            break
        memory = memory[piece:]
    return len(memory)


def _map_array(path: Path, start: int, size: int, checksum: int | None) -> np.ndarray | None:
    """Map the numbers of a .npy file that lies at `start` in a file; None if they must be read."""
    with opened(path) as file:
        file.seek(start)
        head = file.read(min(MOST_HEADER_BYTES, size))
    shape, is_fortran, dtype, offset = read_header(head)
    num_bytes = math.prod(shape) * dtype.itemsize
    if is_fortran or dtype.kind not in "iuf" or dtype.subdtype is not None or not dtype.isnative:
        return None
    if min(shape, default=0) < 0 or size != offset + num_bytes or num_bytes == 0:
        return None
    content = np.memmap(path, np.uint8, "c", start, (size,))  # Writing leaves the file as it is.
    if checksum is not None:
        found = 0
        for first in range(0, size, _PIECE):
            found = zlib.crc32(content[first : first + _PIECE].data, found)
        if found != checksum:
            raise zipfile.BadZipFile(f"a member at {start} has another checksum")
    return np.asarray(content)[offset:].view(dtype).reshape(shape)


def _as_array(content: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind == "b":
        return (content != 0).reshape(shape)  # A file may have any byte as a truth value.
    array = content.view(dtype).reshape(shape)
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    if dtype.kind == "U" and array.view(np.uint32).max(initial=0) > _LAST_CODE_POINT:
        raise ValueError("a text has characters that are none of Unicode's")
    return array


def read_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read a .npy file's head: shape, whether columns come first, type, where numbers begin."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    stream = BytesIO(head)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of headers that Python 2 has written.
            shape, is_fortran, dtype = readers[npy.read_magic(stream)](stream)
    except Exception as error:  # also MemoryError of Python's parser, for signs by the thousand
        raise ValueError("an array does not begin as NumPy's do") from error
    return shape, is_fortran, dtype, stream.tell()
