"""What the fields of one tar header say.

The formats are those of POSIX (ustar and pax), of GNU tar, and the oldest one, without a magic
word: POSIX.1-2017, pax; GNU tar 1.35 manual, "Basic Tar Format". results/NOTES.md says why Python's
tarfile does not read them.
"""

import struct
from typing import NamedTuple

from vigpipe.errors import InputError

BLOCK = 512  # bytes of a header; contents are padded to a multiple
EXTENDED = b"xgLK"  # types of headers whose content is about the next member, or all of them
# name, size, checksum, type, magic word, prefix of the name
_FIELDS = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")


class Header(NamedTuple):
    """What a header says of its member; the size is None if the field holds no such number."""

    name: bytes
    size: int | None
    type_: bytes


def parse_header(block: bytes) -> Header | None:
    """Parse a header of BLOCK bytes; None if its checksum is wrong."""
    name, size, checksum, type_, magic, prefix = _FIELDS.unpack(block)
    if not _is_checksum(checksum, block):
        return None
    name = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:  # GNU tar has times in that place.
        name = prefix.partition(b"\0")[0] + b"/" + name
    return Header(name, _number(size), type_)


def parse_extended(type_: bytes, content: bytes, position: int, where: str) -> dict[bytes, bytes]:
    """Return the path and the size that an extended header gives to the next member, if it does."""
    if type_ == b"L":
        return {b"path": content.partition(b"\0")[0]}
    if type_ == b"K":  # It gives a link's target, and the link itself is refused.
        return {}
    given = _parse_pax(content, position, where)
    if type_ == b"g" and given:
        raise InputError(
            f"{where}: gives all members one {next(iter(given)).decode()} (a global pax header); "
            "make the tar again"
        )
    return given


def _parse_pax(content: bytes, position: int, where: str) -> dict[bytes, bytes]:
    """Return the path and the size from records of "LENGTH KEY=VALUE" and a newline, if given."""
    given: dict[bytes, bytes] = {}
    start = 0
    while start < len(content):
        digits = content[start : start + 10].partition(b" ")[0]
        end = start + int(digits) if digits.isdigit() else 0
        record = content[start + len(digits) + 1 : end]
        key, equals, value = record[:-1].partition(b"=")
        is_wrong = key == b"size" and not (value.isdigit() and len(value) < 20)
        if end > len(content) or not record.endswith(b"\n") or not equals or is_wrong:
            raise InputError(
                f"{where}: the pax header at byte {position} is damaged; make the tar again"
            )
        if key.startswith(b"GNU.sparse"):
            raise InputError(
                f"{where}: the member behind byte {position} is a sparse file, but only whole "
                "files are read; make the tar again without --sparse"
            )
        if key in (b"path", b"size"):
            given[key] = value
        start = end
    return given


def _number(field: bytes) -> int | None:
    """Read an octal number, or GNU's binary one; None if it is neither, or negative."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.partition(b"\0")[0].strip(b" ")
    try:
        return int(digits or b"0", 8) if digits.isdigit() or not digits else None
    except ValueError:  # It has a digit 8 or 9.
        return None


def _is_checksum(field: bytes, header: bytes) -> bool:
    """Compare the sum of the header's bytes, in which the sum itself counts as spaces."""
    expected = _number(field)
    summed = header[:148] + b"        " + header[156:]
    found = sum(summed)
    if found == expected:
        return True
    # Some old writers took bytes as signed.
    return found - 256 * sum(byte >= 0x80 for byte in summed) == expected
