"""Write files atomically: a crash leaves the old file or the new one, never half of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def save_figure(figure: "Figure", path: Path, made_by: str, **options: Any) -> None:  # noqa: ANN401
    """Save a picture in the format of its suffix, replacing the file atomically.

    Args:
        figure: what to draw.
        path: the file, which ends in .png, .pdf or .svg.
        made_by: the command, which the file then names, so that the command may replace it
            (`files.outputs`).
        options: further arguments of `Figure.savefig`.

    Raises:
        OSError: the file cannot be written; the old one is left.
    """
    suffix = path.suffix.lower()
    metadata = {"Software" if suffix == ".png" else "Creator": made_by}
    with replacing(path) as partial:
        figure.savefig(partial, format=suffix[1:], metadata=metadata, **options)
