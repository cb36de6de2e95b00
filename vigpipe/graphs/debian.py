"""Debian's packages as a graph: which needs which, and in which section each belongs.

Every machine with Debian or Ubuntu has the lists of packages that this is made from, so that there
is a graph of tens of thousands of nodes to train on without a download. Format of the lists: Debian
Policy Manual, chapters 5 and 7; `man deb822`.
"""

import bz2
import contextlib
import gzip
import hashlib
import lzma
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import opened
from vigpipe.graphs.graph import NO_CLASS, NO_SPLIT, TEST, TRAIN, VALIDATION

LISTS = Path("/var/lib/apt/lists")
LEAST_IN_CLASS = 100  # a section with fewer packages is no class
NUM_FEATURES = 512
_PATTERN = "*_Packages*"
_MODULES: dict[str, Any] = {".gz": gzip, ".xz": lzma, ".bz2": bz2}  # apt reads its own endings
_MOST_BYTES = 1 << 30  # of a list; Debian's largest has 60 MB
_DAMAGED = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
_APT = "/usr/lib/apt/apt-helper"
_APTS_OWN = (".lz4", ".zst")
_DEPENDENCIES = ("Depends", "Pre-Depends", "Recommends")
_FIELD = re.compile(
    rf"^(Package|Source|Section|Description|{'|'.join(_DEPENDENCIES)}):[ \t]*"
    r"(.*(?:\n[ \t].*)*)",  # lines that begin with a space go on with the field
    re.MULTILINE,
)
_DEPENDENCY = re.compile(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]*)")
_WORD = re.compile(r"[a-z][a-z0-9+#-]+")


@dataclass(frozen=True)
class Package:
    """What the graph takes from a package's stanza."""

    source: str  # the source package that it is built from
    section: str  # without the archive area; empty if it has none
    description: str  # its first line
    needs: tuple[str, ...]  # packages it depends on or recommends, all alternatives of each


def read_packages(folder: Path) -> dict[str, Package]:
    """Read apt's lists of packages, `*_Packages`, plain or compressed, in the order of their names.

    Of several stanzas of a name the first counts. InputError if a list is bad, or there is none.
    """
    packages: dict[str, Package] = {}
    for path in sorted(folder.glob(_PATTERN)):
        if _ending(path) not in ("", *_MODULES, *_APTS_OWN):
            continue
        for stanza in _read(path).split("\n\n"):
            fields = dict(_FIELD.findall(stanza))
            if "Package" in fields:
                packages.setdefault(fields["Package"], _package(fields))
    if not packages:
        raise InputError(
            f"{folder}: holds no lists of packages ({_PATTERN}); run apt-get update, or name "
            "another folder"
        )
    return packages


def _ending(path: Path) -> str:
    return path.name.rpartition("_Packages")[2]


def _read(path: Path) -> str:
    try:
        with opened(path) as packed, _unpacked(path, packed) as file:
            content = file.read(_MOST_BYTES + 1)
    except InputError:
        raise
    except _DAMAGED as error:
        raise InputError(
            f"{path}: cannot be decompressed ({escaped(str(error))}); run apt-get update"
        ) from error
    if len(content) > _MOST_BYTES:
        raise InputError(f"{path}: unpacks to more than {_MOST_BYTES} bytes; run apt-get update")
    return content.decode(errors="replace")


@contextlib.contextmanager
def _unpacked(path: Path, packed: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield what unpacks an open file as it is read: a module of Python's, or apt."""
    if (module := _MODULES.get(_ending(path))) is not None:
        with module.open(packed) as file:
            yield file
        return
    if not _ending(path):
        yield packed
        return
    with subprocess.Popen(
        [_APT, "cat-file", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as apt:
        assert apt.stdout is not None
        yield apt.stdout
        apt.kill()  # of a list that is too large, not all was read
    if apt.returncode > 0:
        raise OSError(f"{_APT} ended with {apt.returncode}")


def _package(fields: Mapping[str, str]) -> Package:
    needs = ",".join(fields[name] for name in _DEPENDENCIES if name in fields)
    return Package(
        source=(fields.get("Source", "").split() or [fields["Package"]])[0],
        section=fields.get("Section", "").rpartition("/")[2],
        description=fields.get("Description", "").partition("\n")[0],
        needs=tuple(_DEPENDENCY.findall(needs)),
    )


def make_arrays(packages: Mapping[str, Package]) -> dict[str, np.ndarray]:
    """Make the arrays of a graph file; the same packages always give the same arrays.

    The nodes are the packages, sorted by name. An edge goes from a package to each that it needs,
    if that is among them. The classes are the sections of at least LEAST_IN_CLASS packages, the
    largest first; InputError if there is none. Each of NUM_FEATURES features says whether a word of
    the description, apart from the package's own name, falls into its bucket. The split is by the
    source package, whose packages depend on one another: 60 % are for training, 20 % for validation
    and 20 % for test.
    """
    names = sorted(packages)
    stanzas = [packages[name] for name in names]
    numbers = {name: number for number, name in enumerate(names)}
    needed = [
        sorted({numbers[other] for other in stanza.needs if other in numbers} - {numbers[name]})
        for name, stanza in zip(names, stanzas, strict=True)
    ]
    words = [
        sorted(
            {_bucket(word) for word in _WORD.findall(stanza.description.lower()) if word != name}
        )
        for name, stanza in zip(names, stanzas, strict=True)
    ]
    parts = np.array([_part(stanza.source) for stanza in stanzas], np.int8)
    classes = _classes(stanzas, parts)
    if not classes:
        raise InputError(
            f"of {len(names)} packages, no section has {LEAST_IN_CLASS} or more to be a class; "
            "take the lists of a whole distribution"
        )
    labels_of = {section: label for label, section in enumerate(classes)}
    labels = np.array([labels_of.get(stanza.section, NO_CLASS) for stanza in stanzas], np.int16)
    parts[labels == NO_CLASS] = NO_SPLIT
    return {
        "edge_src": np.repeat(np.arange(len(names), dtype=np.int32), list(map(len, needed))),
        "edge_dst": np.fromiter(chain.from_iterable(needed), np.int32),
        "x_indptr": np.cumsum([0, *map(len, words)], dtype=np.int32),
        "x_indices": np.fromiter(chain.from_iterable(words), np.int16),
        "x_shape": np.array([len(names), NUM_FEATURES]),
        "y": labels,
        "split": parts,
        "classes": np.array(classes),
        "names": np.array(names),
    }


def _classes(stanzas: Sequence[Package], parts: np.ndarray) -> list[str]:
    sizes = Counter(stanza.section for stanza in stanzas if stanza.section)
    trained = {stanza.section for stanza, part in zip(stanzas, parts, strict=True) if part == TRAIN}
    large = [section for section in sizes if sizes[section] >= LEAST_IN_CLASS]
    return sorted(set(large) & trained, key=lambda section: (-sizes[section], section))


@cache
def _bucket(word: str) -> int:
    return _hash(word) % NUM_FEATURES


@cache
def _part(source: str) -> int:
    return (TRAIN, TRAIN, TRAIN, VALIDATION, TEST)[_hash(f"split {source}") % 5]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest(), "little")
