"""Write files atomically: a crash leaves the old file or the new one, never half of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a hidden file to write, which replaces `path` when the context ends.

    Raises:
        OSError: the file cannot be written; the hidden file is removed.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text as UTF-8, replacing the file atomically.

    Raises:
        OSError: the file cannot be written; the old one is left.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
