"""Write a file so that a crash leaves the old one or the new one, and no half."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden file beside `path` to write to, which takes its place at the end.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_whole(path: Path, text: str) -> None:
    """The same for a text, which is written as UTF-8."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
