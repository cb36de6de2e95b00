"""Write tars of all kinds, good ones by Python's tarfile and bad ones by hand."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

END = bytes(1024)


def write_tar(path: Path, files: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar of files by name, in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of(files, format))
    return path


def tar_of(files: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=format) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def header(
    name: bytes = b"a.png",
    size: int | bytes = 0,
    kind: bytes = b"0",
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
) -> bytes:
    """A header with the right checksum; a size in bytes is written as it is."""
    size = b"%011o\0" % size if isinstance(size, int) else size
    fields = (name.ljust(100, b"\0"), b"0000644\0" + b"0000000\0" * 2, size.ljust(12, b"\0"))
    front = b"".join(fields) + b"00000000000\0"
    behind = kind + bytes(100) + magic.ljust(88, b"\0") + prefix.ljust(155, b"\0") + bytes(12)
    checksum = sum(front) + 8 * ord(" ") + sum(behind)
    return front + b"%06o\0 " % checksum + behind


def member(name: bytes, data: bytes = b"", kind: bytes = b"0", **fields: bytes) -> bytes:
    """A header with content, padded."""
    return header(name, len(data), kind, **fields) + data + bytes(-len(data) % 512)


def pax(**records: bytes) -> bytes:
    """A pax header that gives facts of the next member."""
    return member(b"pax", pax_records(**records), b"x")


def pax_records(**records: bytes) -> bytes:
    content = b""
    for key, value in records.items():
        rest = b" %s=%s\n" % (key.replace("_", ".").encode(), value)
        length = len(rest) + len(str(len(rest)))
        length = len(rest) + len(str(length))
        content += b"%d%s" % (length, rest)
    return content


def png(seed: int = 0, size: tuple[int, int] = (8, 8)) -> bytes:
    """An image of noise; size is (H, W)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "png")
    return content.getvalue()
