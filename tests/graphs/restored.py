"""Files that a test changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def restored(*paths: Path) -> Iterator[None]:
    """Let files be changed, and write them as they were when that is over."""
    contents = [(path, path.read_bytes()) for path in paths]
    try:
        yield
    finally:
        for path, content in contents:
            path.write_bytes(content)
