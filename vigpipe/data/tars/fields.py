"""What the fields of one tar header say.

The formats are those of POSIX (ustar and pax), of GNU tar, and the oldest one, without a magic
word: POSIX.1-2017, pax; GNU tar 1.35 manual, "Basic Tar Format".
"""

import struct
from typing import NamedTuple

from vigpipe.errors import InputError

BLOCK = 512  # bytes of a header; contents are padded to a multiple
GIVES_FACTS = b"xgLK"  # kinds of header whose content is about the next member, or all of them
# name, size, checksum, kind, magic word, prefix of the name
_FIELDS = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")


class Header(NamedTuple):
    """What a header says.

    Attributes:
        name: of the member.
        size: of its content in bytes; None if the field holds no such number.
        kind: one byte.
    """

    name: bytes
    size: int | None
    kind: bytes


def parse_header(block: bytes) -> Header | None:
    """Parse a header of BLOCK bytes; None if its checksum is wrong."""
    name, size, checksum, kind, magic, prefix = _FIELDS.unpack(block)
    if not _is_sum(checksum, block):
        return None
    name = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:  # GNU tar has times in that place
        name = prefix.partition(b"\0")[0] + b"/" + name
    return Header(name, _number(size), kind)


def given_facts(kind: bytes, content: bytes, position: int, where: str) -> dict[bytes, bytes]:
    """Return the path and the size that a header gives to the next member, if it does.

    Args:
        kind: of the header, one of GIVES_FACTS.
        content: what follows the header.
        position: of the header in the tar, for messages.
        where: name of the tar, for messages.

    Raises:
        InputError: the content is damaged, is meant for all members, or makes the next one sparse.
    """
    if kind == b"L":
        return {b"path": content.partition(b"\0")[0]}
    if kind == b"K":  # the target of a link, and the link follows
        return {}
    facts = _pax_facts(content, position, where)
    if kind == b"g" and facts:
        raise InputError(
            f"{where}: gives all members one {next(iter(facts)).decode()} (a global pax header); "
            "make the tar again"
        )
    return facts


def _pax_facts(content: bytes, position: int, where: str) -> dict[bytes, bytes]:
    """Return the path and the size from records of "LENGTH KEY=VALUE" and a newline, if given."""
    facts: dict[bytes, bytes] = {}
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
            facts[key] = value
        start = end
    return facts


def _number(field: bytes) -> int | None:
    """Read an octal number, or GNU's binary one; None if it is neither, or negative."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.partition(b"\0")[0].strip(b" ")
    try:
        return int(digits or b"0", 8) if digits.isdigit() or not digits else None
    except ValueError:  # 8 or 9
        return None


def _is_sum(field: bytes, header: bytes) -> bool:
    """Compare the sum of the header's bytes, in which the sum itself counts as spaces."""
    expected = _number(field)
    rest = header[:148] + b"        " + header[156:]
    found = sum(rest)
    if found == expected:
        return True
    negative = sum(byte >= 0x80 for byte in rest)
    return found - 256 * negative == expected  # some old writers took bytes as signed
