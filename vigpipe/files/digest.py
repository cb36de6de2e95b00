"""The size and the SHA-256 of a file, by which a manifest knows it again."""

import hashlib
import os
from pathlib import Path

from vigpipe.files.untrusted import opened


def file_digest(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a regular file; InputError if there is none."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size, hashlib.file_digest(file, "sha256").hexdigest()
