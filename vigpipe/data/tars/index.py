"""Where the images in a tar file are: found once, and kept in the user's cache between runs.

An entry of the cache is a file of numpy arrays, named after the path of the tar. It serves while
the tar has the size and the times that it had then. If anything is wrong with an entry, it is made
again, and if none can be written, none is.
"""

import hashlib
import os
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vigpipe.data.tars.images import TarImages, find_images
from vigpipe.data.texts import Texts
from vigpipe.errors import InputError
from vigpipe.files.cache import cache_folder
from vigpipe.files.untrusted import opened

_VERSION = 2  # Raise it when `find_images` begins to find something else in the same file.
_INTEGERS = ("facts", "offsets", "sizes", "labels", "name_ends", "folder_ends", "other_ends")
_BYTES = ("names", "folders", "others")


@dataclass(frozen=True)
class Stamp:
    """What tells a file from an earlier one of its name."""

    size: int
    modified_ns: int


def read_stamp(descriptor: int) -> Stamp:
    """Return the stamp of an open file."""
    status = os.fstat(descriptor)
    return Stamp(status.st_size, status.st_mtime_ns)


def index_images(path: Path, field: str | None) -> tuple[TarImages, Stamp]:
    """Find the images in a tar file, or read from the cache where they are; also its stamp."""
    try:
        with opened(path) as file:
            descriptor = file.fileno()
            stamp = read_stamp(descriptor)
            # A copy that keeps the times has another ctime, and chmod does no more than rebuild.
            key = (_VERSION, stamp.size, stamp.modified_ns, os.fstat(descriptor).st_ctime_ns)
            images = _read_entry(path, field, key)
            if images is None:
                images = find_images(descriptor, stamp.size, str(path), field)
                if read_stamp(descriptor) != stamp:
                    raise InputError(
                        f"{path}: was changed while it was read; start again when it is complete"
                    )
                _write_entry(path, field, key, images)
            return images, stamp
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _entry(path: Path, field: str | None) -> Path:
    """Return where the entry of a tar file belongs; raise OSError if there is no cache."""
    hashed = os.fsencode(path.resolve()) + repr(field).encode()
    return cache_folder() / "tars" / f"{hashlib.sha256(hashed).hexdigest()[:32]}.npz"


def _read_entry(path: Path, field: str | None, key: tuple[int, ...]) -> TarImages | None:
    """Read the images from the cache; None if they are not there, or not as they should be."""
    try:
        with opened(_entry(path, field)) as file, zipfile.ZipFile(file) as archive:
            # An image takes more than 512 bytes of the tar, and at most 1,100 of an entry.
            most = 3 * key[1] + (1 << 16)
            if sum(member.file_size for member in archive.infolist()) > most:
                return None
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in (*_INTEGERS, *_BYTES)}
        *known, num_samples = found["facts"].tolist()
        images = TarImages(
            Texts(found["names"].tobytes(), found["name_ends"]),
            found["offsets"],
            found["sizes"],
            found["labels"],
            Texts(found["folders"].tobytes(), found["folder_ends"]),
            num_samples,
            Texts(found["others"].tobytes(), found["other_ends"]),
        )
        has_types = all(found[name].dtype == np.int64 for name in _INTEGERS)
        is_sound = has_types and tuple(known) == key and _is_sound(images, key[1])
        return images if is_sound else None
    except Exception:  # damaged bytes end in almost any exception of zipfile and numpy
        return None


def _is_sound(images: TarImages, num_bytes: int) -> bool:
    """Whether all positions lie in the file, and all labels have a folder."""
    num_labels = len(images.folders) or np.iinfo(np.int64).max
    return (
        len(images) == len(images.offsets) == len(images.sizes) == len(images.labels)
        and _are_ends(images.names)
        and _are_ends(images.folders)
        and _are_ends(images.others)
        and bool((images.offsets >= 0).all() and (images.sizes >= 0).all())
        and bool((images.offsets <= num_bytes - images.sizes).all())
        and bool((images.labels >= 0).all() and (images.labels < num_labels).all())
        and (images.num_samples > 0) == (len(images.folders) == 0)
    )


def _are_ends(texts: Texts) -> bool:
    ends = np.concatenate([[0], texts.ends])
    return bool((np.diff(ends) >= 0).all() and ends[-1] == len(texts.content))


def _write_entry(path: Path, field: str | None, key: tuple[int, ...], images: TarImages) -> None:
    """Write an entry whole or not at all; ranks may do so at the same time."""
    arrays = {
        "facts": np.array([*key, images.num_samples], dtype=np.int64),
        "offsets": images.offsets,
        "sizes": images.sizes,
        "labels": images.labels,
        "name_ends": images.names.ends,
        "names": np.frombuffer(images.names.content, dtype=np.uint8),
        "folder_ends": images.folders.ends,
        "folders": np.frombuffer(images.folders.content, dtype=np.uint8),
        "other_ends": images.others.ends,
        "others": np.frombuffer(images.others.content, dtype=np.uint8),
    }
    try:
        entry = _entry(path, field)
        entry.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
            partial = Path(folder) / entry.name
            np.savez(partial, **arrays)
            partial.replace(entry)
    except OSError:
        return  # The next run finds the images again.
