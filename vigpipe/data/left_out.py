"""Tell in one line of what lies beside the images of a data set, and is not read."""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from vigpipe.files.names import first_few


def suffix_of(name: str) -> str:
    """Return the end of a file's name that says its kind, in small letters; "" if it has none."""
    return PurePath(name).suffix.lower()


def told(suffixes: Counter[str]) -> tuple[str, ...]:
    """Tell of files that are not read, by the suffixes of their names, if there are any."""
    if not suffixes:
        return ()
    kinds = [f"{count:,} {suffix or 'without one'}" for suffix, count in suffixes.most_common()]
    num = suffixes.total()
    what = "1 file is" if num == 1 else f"{num:,} files are"
    return (f"{what} left out, as the suffix is not one of an image: {first_few(kinds)}",)


def not_read(where: str, names: Sequence[str]) -> tuple[str, ...]:
    """Tell of splits or arrays that are there and not read; nothing if there are none."""
    return (f"{where}: not read: {first_few(sorted(names))}",) if names else ()


def unreadable(images: Sequence[str]) -> str:
    """Tell of images that are left out because they cannot be read."""
    return f"left out as unreadable: {counted(images, 'image', 'images')}"


def counted(names: Sequence[str], one: str, many: str) -> str:
    """Say how many there are, and name the first: `2 images (a.png, b.png)`."""
    return f"{len(names):,} {one if len(names) == 1 else many} ({first_few(names)})"
