"""Write files atomically: a crash leaves the old file or the new one, never half of it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden file to write: it replaces `path` at the end, or goes after an exception."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def sync(path: Path) -> None:
    """Force a file or a folder to disk; OSError if a file cannot be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a text as UTF-8, replacing the file atomically; an OSError leaves the old one."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def save_figure(figure: "Figure", path: Path, made_by: str, **options: Any) -> None:
    """Save a picture as .png, .pdf or .svg, replacing the file atomically."""
    suffix = path.suffix.lower()
    # It names the command that made it, so that this command may replace it (`files.outputs`).
    metadata = {"Software" if suffix == ".png" else "Creator": made_by}
    with replacing(path) as partial:
        figure.savefig(partial, format=suffix[1:], metadata=metadata, **options)
