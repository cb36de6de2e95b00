"""Which tar files hold the train images of a folder, and which the test images.

In this order: a list in _info.json, as timm writes it beside WebDataset's shards; the tars in
train/ and test/; or tars in the folder itself with such a word in their names:

    imagenet/_info.json
    imagenet/train/n01440764.tar ...        imagenet/val/n01440764.tar ...
    imagenet/imagenet1k-train-0000.tar ...  imagenet/imagenet1k-validation-00.tar ...
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vigpipe.errors import InputError
from vigpipe.files.names import is_plain
from vigpipe.files.untrusted import read_json

# Words for each split; the first that is there counts.
_SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}
_INFO = ("_info.json", "info.json")  # The second may be about anything.
# Endings of files that can only be read from their beginning to their end.
_COMPRESSED = (
    *(".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz"),
    *(".tar.zst", ".tzst", ".tar.lz4", ".tar.lzma", ".tar.z"),
)


@dataclass(frozen=True)
class Shards:
    """The tar files of a split, and what a list says of their samples, if there is one."""

    paths: tuple[Path, ...]
    lengths: tuple[int, ...] | None = None  # the number of samples in each file
    num_samples: int | None = None
    field: str | None = None  # the key of the label in the JSON of every sample


def seem_there(root: Path) -> bool:
    """Whether the names in a folder are those of tar files, or of compressed ones or TFRecords."""
    if os.path.isfile(root):
        return _is_archive(root.name)
    train = _visible(root / "train")
    if any(os.path.isdir(root / "train" / name) for name in train):  # These hold images.
        return False
    if any(map(_is_archive, train)):
        return True
    archives = [name for name in _visible(root) if _is_archive(name)]
    if not os.path.isdir(root / "train"):
        return bool(archives) or os.path.isfile(root / _INFO[0])
    return any("train" in _words(name) for name in archives)


def find_shards(root: Path) -> dict[str, Shards]:
    """Find the tar files of the train and of the test images."""
    if os.path.isfile(root):
        _check_seekable(root)
        raise InputError(
            f"{root}: is one tar file, but train and test images are told apart by files; name a "
            "folder with train.tar and test.tar"
        )
    for name in _INFO:
        if os.path.exists(root / name):
            info = read_json(root / name)
            splits = info.get("splits") if isinstance(info, dict) else None
            if isinstance(splits, dict) and _lists_files(splits):
                return {split: _listed(root, root / name, splits, split) for split in _SPLITS}
    return {split: _named(root, split) for split in _SPLITS}


def _lists_files(splits: dict[str, Any]) -> bool:
    return any(isinstance(entry, dict) and "filenames" in entry for entry in splits.values())


def _listed(root: Path, path: Path, splits: dict[str, Any], split: str) -> Shards:
    words = _SPLITS[split]
    word = next((word for word in words if word in splits), None)
    entry = splits.get(word) if word else None
    if not isinstance(entry, dict):
        raise InputError(
            f"{path}: lists no {split} images, which are expected under {' or '.join(words)}; "
            "complete the list"
        )
    names, lengths = entry.get("filenames"), entry.get("shard_lengths")
    if not isinstance(names, list) or not names or not all(map(_is_tar_below, names)):
        raise InputError(
            f"{path}: its filenames of {word} are not a list of .tar files in or below {root}; "
            "correct the list, and download files that are elsewhere"
        )
    paths = tuple(root / name for name in names)
    if len(set(paths)) < len(paths):
        raise InputError(f"{path}: lists a file of {word} twice; correct the list")
    has_lengths = isinstance(lengths, list) and len(lengths) == len(names)
    if lengths is not None and not (has_lengths and all(type(n) is int for n in lengths)):
        raise InputError(
            f"{path}: its shard_lengths of {word} are not {len(names)} whole numbers, one for each "
            "of the filenames; correct the list"
        )
    num_samples, field = entry.get("num_samples"), entry.get("alt_label") or None
    if not isinstance(num_samples, int | None) or not isinstance(field, str | None):
        raise InputError(
            f"{path}: expected a whole number as num_samples of {word}, and a text as alt_label; "
            "correct the list"
        )
    return Shards(paths, tuple(lengths) if lengths else None, num_samples, field)


def _is_tar_below(name: object) -> bool:
    if not isinstance(name, str) or not is_plain(name) or ":" in name:
        return False
    parts = PurePosixPath(name).parts
    return name.endswith(".tar") and not name.startswith("/") and ".." not in parts


def _named(root: Path, split: str) -> Shards:
    """Find the tar files of a split by the names of folders, or by their own."""
    for candidates in (_candidates(root, word) for word in _SPLITS[split]):
        tars = [path for path in candidates if path.name.lower().endswith(".tar")]
        if tars:
            if tars[0].parent == root:  # In train/, tars are named after classes.
                _check_one_split(tars, split)
            return Shards(tuple(tars))
        for path in candidates:
            _check_seekable(path)
    words = " or ".join(f"{word}.tar" for word in _SPLITS[split])
    raise InputError(
        f"{root}: has no tar files of {split} images; expected {words}, several tars with this "
        "word in their names, or a folder of this name with tars in it"
    )


def _candidates(root: Path, word: str) -> list[Path]:
    """Return the archives in the folder of this name, or else those with this word in theirs."""
    inside = [root / word / name for name in _visible(root / word) if _is_archive(name)]
    beside = [root / name for name in _visible(root) if _is_archive(name) and word in _words(name)]
    return inside or beside


def _check_one_split(tars: list[Path], split: str) -> None:
    others = {word for other, words in _SPLITS.items() if other != split for word in words}
    for path in tars:
        both = _words(path.name) & others
        if both:
            raise InputError(
                f"{path}: has both {split!r} and {min(both)!r} in its name, and is either for "
                "training or for testing; rename it"
            )


def _check_seekable(path: Path) -> None:
    if path.name.lower().endswith(_COMPRESSED):
        raise InputError(
            f"{path}: is compressed, and can only be read from its beginning to its end; "
            "decompress it to a .tar, in which each image has its place"
        )
    if _is_tfrecord(path.name):
        raise InputError(
            f"{path}: is a TFRecord file, which can only be read from its beginning to its end; "
            "write the images into folders or tars"
        )


def _is_archive(name: str) -> bool:
    return name.lower().endswith((".tar", *_COMPRESSED)) or _is_tfrecord(name)


def _is_tfrecord(name: str) -> bool:
    return ".tfrecord" in name.lower()


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def _visible(folder: Path) -> list[str]:
    """List the names in a folder, sorted; none if it cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []
