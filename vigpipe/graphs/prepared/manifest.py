"""What is in a prepared folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

from vigpipe.config.prepared import MANIFEST
from vigpipe.errors import InputError
from vigpipe.files.atomic import write_atomically
from vigpipe.files.names import escaped, is_plain
from vigpipe.files.untrusted import read_json
from vigpipe.graphs.features import Scaling
from vigpipe.graphs.formats.checked import MOST_FEATURES
from vigpipe.graphs.partitions.partition import METHODS, Method

NODES = "nodes.safetensors"
NAMES = "names.json"
MOST_PARTS = 1 << 16  # two files each
# What is new in version 2 earlier versions of vigpipe would read wrongly, or not at all.
_FORMAT, _VERSION, _NEW_VERSION = "vigpipe graph", 1, 2
_MOST_BYTES = 64 << 20  # a manifest has some 300 bytes for each part
_MOST = 1 << 62  # all numbers in a manifest are below this


@dataclass(frozen=True)
class FileFacts:
    """The size and SHA-256, in hexadecimal digits, that a file must have."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is in a prepared folder."""

    source: str  # what the graph was prepared from
    nodes: int
    edges: int  # directed ones
    weighted: bool  # whether edges have weights
    unknown: bool  # whether it is not known of some nodes if they have a class, of several
    features: int  # how many a node has
    stored: int | None  # how many numbers sparse features store; None if they are dense
    multi_label: bool
    class_names: tuple[str, ...]
    columns: str | None  # `Choices.as_text` of the graph, if it has some
    scaling: Scaling  # --features
    symmetric: bool  # whether the missing reverse of edges was added
    partition: Method
    seed: int  # of the partition, and of a random graph
    kept_edges: int  # those with both ends in the same part
    seconds: float  # how long it took to make the parts
    part_nodes: tuple[int, ...]  # how many each part has
    graph_sha256: str  # `Graph.sha256` of the graph in the folder
    files: Mapping[str, FileFacts]  # by their names in the folder

    @property
    def num_parts(self) -> int:
        return len(self.part_nodes)

    @property
    def first_nodes(self) -> list[int]:
        """The first node of each part, and n."""
        return list(accumulate(self.part_nodes, initial=0))


def file_of_part(what: str, part: int) -> str:
    """Return the name of the file of a part's `edges`, those that end in it, or `features`."""
    return f"{what}/{part:05}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder; OSError if that fails."""
    version = _NEW_VERSION if manifest.weighted or manifest.unknown else _VERSION
    table = {"format": _FORMAT, "version": version, **asdict(manifest)}
    write_atomically(folder / MANIFEST, json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder; InputError if there is none, or it is not one."""
    path = folder / MANIFEST
    table = read_json(path, _MOST_BYTES)
    if not isinstance(table, dict) or table.get("format") != _FORMAT:
        raise InputError(
            f"{path}: is not the manifest of a prepared graph; give a folder that `vigpipe dataset "
            "prepare` has made"
        )
    if table.get("version") not in (_VERSION, _NEW_VERSION):
        raise InputError(
            f"{path}: has another version of the format than {_VERSION} or {_NEW_VERSION}; prepare "
            "the folder with the vigpipe that reads it"
        )
    try:
        return _parsed({"columns": None, "weighted": False, "unknown": False, **table})
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{path}: {escaped(str(error))}; it was changed: prepare the folder anew"
        ) from error


def _parsed(table: dict[str, Any]) -> Manifest:
    """Check every value; KeyError if one is missing, ValueError if one is wrong."""
    manifest = Manifest(**{name: check(name, table[name]) for name, check in _CHECKS.items()})
    num_parts = manifest.num_parts
    if sum(manifest.part_nodes) != manifest.nodes or not 1 <= num_parts <= MOST_PARTS:
        raise ValueError("part_nodes do not add up to nodes")
    if manifest.kept_edges > manifest.edges or not 1 <= manifest.features <= MOST_FEATURES:
        raise ValueError("kept_edges or features are out of range")
    of_parts = {file_of_part(what, p) for p in range(num_parts) for what in ("edges", "features")}
    needed = of_parts | {NODES}
    if not needed <= set(manifest.files) <= needed | {NAMES}:
        raise ValueError("files are not those of its parts")
    return manifest


def _files(name: str, table: object) -> dict[str, FileFacts]:
    if not isinstance(table, dict):
        raise ValueError(f"{name} are no table")
    return {
        file: FileFacts(_whole(file, facts["bytes"]), _digest(file, facts["sha256"]))
        for file, facts in table.items()
        if isinstance(facts, dict)
    }


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} are no list")
    return value


def _duration(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise ValueError(f"{name} are no duration")
    return float(value)


def _whole(name: str, value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise ValueError(f"{name} is no whole number of {least} or more")
    return value


def _truth(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name} is neither true nor false")
    return value


def _text(name: str, value: object) -> str:
    if type(value) is not str or not value.strip() or not is_plain(value):
        raise ValueError(f"{name} is no text, or has control characters in it")
    return value


def _one_of(choices: tuple[str, ...], name: str, value: object) -> object:
    if value not in choices:
        raise ValueError(f"{name} is none of {', '.join(choices)}")
    return value


def _digest(name: str, value: object) -> str:
    if type(value) is not str or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ValueError(f"{name} has no SHA-256")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "source": _text,
    "nodes": _whole,
    "edges": _whole,
    "weighted": _truth,
    "unknown": _truth,
    "features": _whole,
    "stored": lambda name, value: None if value is None else _whole(name, value),
    "multi_label": _truth,
    "class_names": lambda name, value: tuple(_text(name, text) for text in _list(name, value)),
    "columns": lambda name, value: None if value is None else _text(name, value),
    "scaling": partial(_one_of, get_args(Scaling)),
    "symmetric": _truth,
    "partition": partial(_one_of, METHODS),
    "seed": _whole,
    "kept_edges": _whole,
    "seconds": _duration,
    "part_nodes": lambda name, value: tuple(_whole(name, size, 1) for size in _list(name, value)),
    "graph_sha256": _digest,
    "files": _files,
}
