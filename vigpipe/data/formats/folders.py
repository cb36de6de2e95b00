"""A folder of image files: train/<class>/<image>, test/<class>/<image> and val/<class>/<image>.

val/ (or validation/) has the validation images, or the test images where there is no test/. Of a
folder with the folders of the classes in it, all are train images. The images of test/ or val/ may
also lie in no class folder, as ImageNet's do, beside the list of their classes (`ground_truth`).
"""

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vigpipe.data.formats import ground_truth
from vigpipe.data.images import EXTENSIONS, in_channels, is_image, read_image
from vigpipe.data.left_out import not_read, suffix_of, told
from vigpipe.data.stored import Stored, StoredImages
from vigpipe.data.texts import Texts, pack
from vigpipe.errors import InputError
from vigpipe.files.names import escaped, first_few, is_plain
from vigpipe.messages import plural

_STATS_AT_ONCE, _FILES_AT_ONCE = 16, 4096
SPLIT_OF = {"train": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation"), "validation"
)  # by what a folder, or a cell of a table, may be called


def read(root: Path) -> Stored:
    """Find the image files; the classes are those of the train images, or else of all."""
    folders, others = split_folders(root), Counter[str]()
    classes: dict[str, dict[str, list[Path]]] = {}
    flat = {split for split in folders if split != "train" and _is_flat(folders[split])}
    for split, folder in folders.items():
        known = [*classes.get("train", ())]
        if split in flat:
            classes[split] = ground_truth.read(root, folder, known)
        else:
            classes[split] = list_classes(folder, others)
        unknown = [name for name in classes[split] if known and name not in known]
        if unknown:
            if split not in flat:
                _check_depth(folder, unknown[0], known)
            raise InputError(
                f"{folder / unknown[0]}: {folders['train']} has no class {unknown[0]!r}; the "
                f"{split} classes are among the train classes ({len(unknown)} of "
                f"{len(classes[split])} are not)"
            )
    if len(classes.get("train", ())) == 1:
        _check_depth(folders["train"], *classes["train"])
    names = (*classes.get("train", ()),) or (*sorted({n for of in classes.values() for n in of}),)
    images = {split: _stored_of(of, names, root) for split, of in classes.items()}
    nothing = _stored_of({}, names, root)
    return Stored(
        names,
        images.get("train", nothing),
        images.get("test", nothing),
        notes=(
            *_beside(root, folders.values()),
            *_in_no_class(folders[split] for split in folders if split not in flat),
            *told(others),
        ),
        validation=images.get("validation"),
    )


def _stored_of(
    classes: Mapping[str, list[Path]], class_names: Sequence[str], root: Path
) -> StoredImages:
    label_of = {name: label for label, name in enumerate(class_names)}
    labels = [label_of[name] for name in classes for _ in classes[name]]
    paths = [path for name in classes for path in classes[name]]
    files = Files(pack(map(str, paths)), root=str(root))
    return StoredImages(np.asarray(labels, dtype=np.int64), files)


@dataclass(frozen=True)
class Files:
    """Reads image files, in grey for a model of one channel."""

    paths: Texts
    channels: int = 3
    root: str = ""  # of the data set

    def __call__(self, index: int) -> Image.Image:
        return in_channels(read_image(Path(self.paths[index])), self.channels)

    def name_of(self, index: int) -> str:
        return self.paths[index]

    def marks(self) -> Iterable[bytes]:
        with ThreadPoolExecutor(_STATS_AT_ONCE) as threads:  # a network's answers take a while
            yield from threads.map(self._marks, range(0, len(self.paths), _FILES_AT_ONCE))

    def _marks(self, first: int) -> bytes:
        """Return the names and the sizes of some files."""
        before, marks = "" if self.root == "." else os.path.join(self.root, ""), bytearray()
        for index in range(first, min(first + _FILES_AT_ONCE, len(self.paths))):
            path = self.paths[index]
            marks += os.fsencode(path.removeprefix(before)) + b"\0"
            with contextlib.suppress(OSError):  # whoever reads the image says so
                marks += os.stat(path).st_size.to_bytes(8, "little")
        return bytes(marks)


def split_folders(root: Path) -> dict[str, Path]:
    """Find the folder of images of each split; without any, the root is that of train images."""
    there: dict[str, Path] = {}
    for entry in _entries(root):
        split = SPLIT_OF.get(entry.name.lower())
        if split is None or not (_is_folder(entry) or entry.is_symlink()):
            continue
        if not os.path.exists(entry):
            raise InputError(f"{entry.path}: is a link that leads nowhere; mend or remove it")
        if split in there:
            raise InputError(
                f"{root}: has {there[split].name}/ and {entry.name}/, expected one folder of "
                f"{split} images; move one away"
            )
        there[split] = root / entry.name
    if "validation" in there and "test" not in there:
        there["test"] = there.pop("validation")
    there = {split: there[split] for split in ("train", "test", "validation") if split in there}
    return there or {"train": root}


def _beside(root: Path, folders: Collection[Path]) -> tuple[str, ...]:
    """Tell of the folders beside those of the splits, which are not read."""
    names = [entry.name for entry in _entries(root) if _is_folder(entry)]
    return (
        ()
        if root in folders
        else not_read(str(root), [n for n in names if root / n not in folders])
    )


def _is_flat(folder: Path) -> bool:
    """Whether a folder has images and no folders."""
    entries = _entries(folder)
    return any(map(_is_image, entries)) and not any(map(_is_folder, entries))


def _in_no_class(folders: Iterable[Path]) -> Iterator[str]:
    """Count the images that lie beside the class folders."""
    for folder in folders:
        num = sum(map(_is_image, _entries(folder)))
        if num:
            yield f"{folder}: images in no class folder are left out ({num:,})"


def _check_depth(folder: Path, name: str, expected: Collection[str] = ()) -> None:
    """Refuse a class that holds no image but folders, some of them as expected, if any are."""
    entries = _entries(folder / name)
    inside = [entry.name for entry in entries if _is_folder(entry)]
    is_deep = any(name in expected for name in inside) if expected else bool(inside)
    if is_deep and not any(map(_is_image, entries)):
        raise InputError(
            f"{folder / name}: holds {plural(len(inside), 'folder')} ({first_few(inside)}) and no "
            f"image, so that all images below would be of one class, {name!r}; move the class "
            f"folders up into {folder}"
        )


def list_classes(folder: Path, others: Counter[str] | None = None) -> dict[str, list[Path]]:
    """List the image files of every class by its name, sorted by name, without opening any.

    Class folders may contain folders, and all may be links: a folder that is reached twice is
    listed once, and one that contains the class folder never, because it contains other classes.
    Hidden files and names without an image's extension are left out. A broken link to an image is
    listed, so that reading it reports the error. The suffixes of files that are no images are added
    to `others`.
    """
    entries = _entries(folder)
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry):
            raise InputError(
                f"{entry.path}: is a link that leads nowhere, where a class folder is expected; "
                "mend or remove it"
            )
    names = [entry.name for entry in entries if _is_folder(entry)]
    if not names:
        raise InputError(
            f"{folder}: has no class folders; images are expected as {folder.name}/<class>/<image>"
            ", or as train/<class>/<image> and test/<class>/<image> in it"
        )
    for name in names:
        if not is_plain(name):  # It could not be kept with the weights, or not be printed.
            raise InputError(
                f"{folder}: the class folder {escaped(name)} has control characters in its name, "
                "or bytes that are not UTF-8; rename it"
            )
    classes = {name: images_below(folder / name, _above(folder / name), others) for name in names}
    if others is not None:
        beside = [e.name for e in entries if not is_image(e.name) and not _is_folder(e)]
        others.update(map(suffix_of, beside))
    for name, paths in classes.items():
        if not paths:
            raise InputError(
                f"{folder / name}: class {name!r} has no images; add some "
                f"({', '.join(EXTENSIONS)}) or remove the folder"
            )
    return classes


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed ({error.strerror})") from error
    return sorted(visible, key=lambda entry: entry.name)


def _is_image(entry: os.DirEntry[str]) -> bool:
    return is_image(entry.name) and not _is_folder(entry)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a folder; only links need a system call, since files may be many."""
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()


def _identity(folder: Path) -> tuple[int, int]:
    try:
        status = folder.stat()
    except OSError as error:
        raise InputError(f"{folder}: cannot be listed ({error.strerror})") from error
    return status.st_dev, status.st_ino


def _above(folder: Path) -> set[tuple[int, int]]:
    """Return the identities of the folders that contain this folder and, if a link, its target."""
    target, here = os.path.realpath(folder), os.path.realpath(folder.parent)
    return {_identity(path) for path in (*Path(target).parents, *Path(here, folder.name).parents)}


def images_below(
    folder: Path, above: Collection[tuple[int, int]] = (), others: Counter[str] | None = None
) -> list[Path]:
    """List the images in a folder and below, sorted by name; each folder once, none of `above`.

    The suffixes of other files are added to `others`.
    """
    paths: list[Path] = []
    seen = set(above)
    pending = [(folder, True)]  # Recursion would fail at a depth of 1000.
    while pending:
        path, is_folder = pending.pop()
        if not is_folder:
            paths.append(path)
        elif (identity := _identity(path)) not in seen:
            seen.add(identity)
            for entry in reversed(_entries(path)):
                is_folder = _is_folder(entry)
                if is_folder or is_image(entry.name):
                    pending.append((path / entry.name, is_folder))
                elif others is not None:
                    others[suffix_of(entry.name)] += 1
    return paths
