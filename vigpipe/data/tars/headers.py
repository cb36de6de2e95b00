"""The members of a tar file and where their bytes are, found from its headers alone.

What could be read in two ways, or would be no plain file in its folder when extracted, is refused.
"""

import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vigpipe.data.tars.fields import BLOCK, EXTENDED, parse_extended, parse_header
from vigpipe.data.texts import Texts, pack
from vigpipe.errors import InputError
from vigpipe.files.names import escaped, is_plain

_MOST_EXTENDED = 1 << 16  # bytes of a header that gives a member's name or size
_LONGEST_NAME = 4096  # bytes, as Linux allows for a path
_BEHIND_END = 1 << 16  # bytes that are looked at behind the end mark; tar pads to 10,240
_REFUSED_TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


@dataclass(frozen=True)
class Members:
    """The plain files in a tar, without hidden ones, in the order of the tar."""

    names: Texts  # paths without "./" before them; each is there once
    offsets: np.ndarray  # (n,) int64, in the file on disk, in which every member lies wholly
    sizes: np.ndarray  # (n,) int64

    def __len__(self) -> int:
        return len(self.names)


def find_members(descriptor: int, start: int, end: int, where: str) -> Members:
    """Find the members of a tar that lies between two positions; errors begin with `where`."""
    offsets, sizes, hashes = array("q"), array("q"), array("q")

    def listed() -> Iterator[str]:
        for raw, offset, size in _files(descriptor, start, end, where):
            name = _visible(raw, where)
            if name == "":
                raise InputError(f"{where}: a member at byte {offset - start} has no name; name it")
            if name is not None:
                offsets.append(offset)
                sizes.append(size)
                hashes.append(hash(name))
                yield name

    names = pack(listed())
    _check_unique(names, np.array(hashes, dtype=np.int64), where)
    return Members(names, np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64))


def _files(descriptor: int, start: int, end: int, where: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, the offset and the size of every plain file; folders are skipped."""
    position = start
    given: dict[bytes, bytes] = {}  # path and size, by headers before the member's own
    while any(header := _read(descriptor, position, BLOCK, end, where)):
        parsed = parse_header(header)
        if parsed is None:
            raise _no_header(header, position - start, where)
        short_name, size, type_ = parsed
        offset = position + BLOCK
        if type_ in EXTENDED:
            if size is None or size > _MOST_EXTENDED:
                raise InputError(
                    f"{where}: the header at byte {position - start} announces {size} bytes about "
                    f"the next member, expected at most {_MOST_EXTENDED}; make the tar again"
                )
            content = _read(descriptor, offset, size, end, where)
            more = parse_extended(type_, content, position - start, where)
            if given.keys() & more.keys():
                raise InputError(
                    f"{where}: the member behind byte {position - start} is given two names or "
                    "sizes; make the tar again"
                )
            given |= more
            position = offset + _padded(size)
            continue
        name = given.get(b"path") or short_name
        size = int(given[b"size"]) if b"size" in given else size
        if _is_file(name, type_, size, end - offset, where):
            assert size is not None
            yield name, offset, size
        position = offset + _padded(size or 0)
        given = {}
    if given:
        raise InputError(
            f"{where}: ends after a name whose member is missing; it is cut off, so fetch or make "
            "it again"
        )
    if any(os.pread(descriptor, min(_BEHIND_END, end - position), position)):
        raise InputError(
            f"{where}: has more behind its end mark at byte {position - start}; if tars were "
            "joined by `cat`, keep them apart or join them by `tar --concatenate`"
        )


def _is_file(name: bytes, type_: bytes, size: int | None, most: int, where: str) -> bool:
    """Whether a member is a plain file and no folder; refuse others, and over `most` bytes."""
    if size is None:
        raise InputError(
            f"{where}: {_shown(name)}: its size is no octal number; make the tar again"
        )
    if type_ == b"5" or (name.endswith(b"/") and type_ in b"0\0"):
        if size:
            raise InputError(
                f"{where}: {_shown(name)}: is a folder of {size} bytes, expected 0; make the tar "
                "again"
            )
        _visible(name, where)  # This refuses a bad name.
        return False
    if type_ not in b"0\x007":
        what = _REFUSED_TYPES.get(type_, f"of the unknown type {type_!r}")
        raise InputError(
            f"{where}: {_shown(name)}: is {what}, but only files and folders are read; make the "
            "tar again from files (`tar --dereference --hard-dereference`)"
        )
    if size > most:
        raise InputError(
            f"{where}: {_shown(name)}: has {size} bytes, but the tar ends after {most} of them; it "
            "is cut off, so fetch or make it again"
        )
    return True


def _read(descriptor: int, position: int, size: int, end: int, where: str) -> bytes:
    content = os.pread(descriptor, min(size, end - position), position) if position < end else b""
    if len(content) < size:
        raise InputError(
            f"{where}: ends without the end mark of a tar; it is cut off, so fetch or make it again"
        )
    return content


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _visible(raw: bytes, where: str) -> str | None:
    """Return a member's path without "./"; None for a hidden file, or one in a hidden folder."""
    if len(raw) > _LONGEST_NAME:
        raise InputError(
            f"{where}: {_shown(raw)}: is a name of {len(raw)} bytes, expected at most "
            f"{_LONGEST_NAME}; make the tar again"
        )
    name = raw.decode("utf-8", "surrogateescape")
    # Nearly all names pass the first test, in a tenth of the second one's time.
    if not name.isprintable() and not is_plain(name):
        raise InputError(
            f"{where}: {_shown(raw)}: has control characters in its name, or bytes that are not "
            "UTF-8; rename it"
        )
    if name.startswith("/") or "/../" in f"/{name}/":
        raise InputError(
            f"{where}: {_shown(raw)}: leads out of the tar, where names begin with neither `/` "
            "nor `..`; make the tar again from inside its folder"
        )
    if "/." in f"/{name}" or "//" in name:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        return None if any(part.startswith(".") for part in parts) else "/".join(parts)
    return name


def _check_unique(names: Texts, hashes: np.ndarray, where: str) -> None:
    """Raise InputError if a name is there twice; only names of equal hashes are compared."""
    order = np.argsort(hashes)
    is_same = np.flatnonzero(np.diff(hashes[order]) == 0)
    suspects = np.union1d(order[is_same], order[is_same + 1])
    counts = Counter(names[int(index)] for index in suspects)
    for name, count in counts.items():
        if count > 1:
            raise InputError(
                f"{where}: {name}: is there {count} times, and which of them is meant is unknown; "
                "make the tar again"
            )


def _no_header(header: bytes, position: int, where: str) -> InputError:
    if position:
        return InputError(
            f"{where}: the header at byte {position} is damaged (its checksum is wrong); fetch or "
            "make the tar again"
        )
    for magic, program in _COMPRESSED.items():
        if header.startswith(magic):
            return InputError(
                f"{where}: is compressed by {program}, where images cannot be read one by one; "
                "decompress it"
            )
    return InputError(f"{where}: is not a tar file; fetch or make it again")


def _shown(name: bytes) -> str:
    return escaped(name.decode("utf-8", "surrogateescape"))
