"""The manifest of a checkpoint: what it is of, and how to know that every byte is there.

    {"format": "vigpipe checkpoint 1",
     "sha256": of "checkpoint" as JSON with sorted keys,
     "checkpoint": {"step": 50, "files": {NAME: {"bytes": ..., "sha256": ...}}, ...}}

safetensors and JSON notice a file that was cut off; only a checksum notices a flipped bit.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.files.atomic import write_whole
from vigpipe.files.untrusted import opened, read_json

FORMAT = "vigpipe checkpoint 1"
NAME = "manifest.json"
_FOLDER = re.compile(r"step-([0-9]{8,})")
_FILE = re.compile(r"stage[0-9]+-replica[0-9]+\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_AGAIN = "give another checkpoint"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of.

    Attributes:
        step: optimizer steps done.
        num_steps: of the whole run.
        evaluated: whether the evaluation that follows this step, if any, has been made.
        loss: of the last step; None if it was skipped.
        config: the resolved options, as in config.toml.
        data: what the images were, as `Run.fingerprint` tells.
        layout: the degrees it was written under.
        weights: what `checkpoint.weights.read_metadata` says of the weights.
        versions: of the packages, with the commit.
        files: of every file its "bytes" and "sha256".
    """

    step: int
    num_steps: int
    evaluated: bool
    loss: float | None
    config: dict[str, Any]
    data: dict[str, Any]
    layout: dict[str, Any]
    weights: dict[str, str]
    versions: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def text(self) -> str:
        """The manifest as its file has it."""
        content = asdict(self)
        return json.dumps(
            {"format": FORMAT, "sha256": _digest(content), "checkpoint": content}, indent=1
        )


def folder_name(step: int) -> str:
    """Name of a checkpoint's folder."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, or in the `checkpoints` of a run's folder; newest first."""
    for place in (folder / "checkpoints", folder):
        try:
            names = [entry.name for entry in os.scandir(place) if entry.is_dir()]
        except OSError:
            continue
        found = {int(m[1]): place / m[0] for m in map(_FOLDER.fullmatch, names) if m}
        if found:
            return [found[step] for step in sorted(found, reverse=True)]
    return []


def checkpoints_at(place: Path, option: str = "") -> list[Path]:
    """The place itself if it is a checkpoint, else those of the run that it is; newest first.

    Args:
        place: that the user has named.
        option: behind which, with a space.

    Raises:
        InputError: there is none.
    """
    if (place / NAME).exists():
        return [place]
    if found := list_checkpoints(place):
        return found
    if not place.is_dir():
        raise InputError(f"{option}{place}: is no folder; name a run or one of its checkpoints")
    raise InputError(
        f"{option}{place}: holds no checkpoints; name a run that has some, or one of them"
    )


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        InputError: it is missing, damaged, or not one of ours.
    """
    return read_manifest_file(checkpoint / NAME)


def read_manifest_file(path: Path) -> Manifest:
    """The same by the file's own name."""
    table = read_json(path)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        found = table.get("format") if isinstance(table, dict) else None
        raise InputError(f"{path}: expected the format {FORMAT!r}, got {found!r}; {_AGAIN}")
    content = table.get("checkpoint")
    if not isinstance(content, dict) or table.get("sha256") != _digest(content):
        raise InputError(f"{path}: its SHA-256 does not fit: it was damaged or edited; {_AGAIN}")
    names = {f.name for f in fields(Manifest)}
    if content.keys() != names:
        odd = sorted(content.keys() ^ names)
        raise InputError(f"{path}: has other keys than a checkpoint ({', '.join(odd)}); {_AGAIN}")
    for key in ("config", "data", "layout", "weights", "versions", "files"):
        if not isinstance(content[key], dict):
            raise InputError(f"{path}: {key} is no table; {_AGAIN}")
    for key in ("step", "num_steps"):
        if type(content[key]) is not int or content[key] < 0:
            raise InputError(f"{path}: {key} is no count: {content[key]!r}; {_AGAIN}")
    if not isinstance(content["evaluated"], bool):
        raise InputError(f"{path}: evaluated is neither true nor false; {_AGAIN}")
    if not isinstance(content["loss"], float | int | None):
        raise InputError(f"{path}: loss is no number: {content['loss']!r}; {_AGAIN}")
    if not content["files"]:
        raise InputError(f"{path}: names no files; {_AGAIN}")
    for name, facts in content["files"].items():
        _check_file_entry(path, name, facts)
    return Manifest(**content)


def _check_file_entry(path: Path, name: str, facts: object) -> None:
    good = (
        _FILE.fullmatch(name)  # no path that leads elsewhere
        and isinstance(facts, dict)
        and facts.keys() == {"bytes", "sha256"}
        and type(facts["bytes"]) is int
        and isinstance(facts["sha256"], str)
        and _SHA256.fullmatch(facts["sha256"])
    )
    if not good:
        raise InputError(f"{path}: its entry of the file {name!r} is malformed; {_AGAIN}")


def verify(checkpoint: Path) -> Manifest:
    """Read the manifest, and every byte of every file.

    Raises:
        InputError: something is missing, damaged, swapped or foreign; the file is named.
    """
    manifest = read_manifest(checkpoint)
    for name, facts in manifest.files.items():
        path = checkpoint / name
        size, digest = file_digest(path)
        if size != facts["bytes"]:
            raise InputError(f"{path}: has {size} bytes, expected {facts['bytes']}; {_AGAIN}")
        if digest != facts["sha256"]:
            raise InputError(f"{path}: its SHA-256 does not fit the manifest's; {_AGAIN}")
    return manifest


def file_digest(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a regular file.

    Raises:
        InputError: it cannot be read.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size, hashlib.file_digest(file, "sha256").hexdigest()


def file_facts(path: Path) -> dict[str, Any]:
    """The entry of a file in `Manifest.files`."""
    size, digest = file_digest(path)
    return {"bytes": size, "sha256": digest}


def write_note(shard: Path, text: str) -> None:
    """Tell others that a rank's file is whole; the note appears at once, or not at all."""
    write_whole(shard.with_suffix(".json"), text)


def tensor_names(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """The file of every tensor, by the tensor's name.

    Raises:
        InputError: a file is no safetensors file, or two have a tensor of one name.
    """
    found: dict[str, str] = {}
    for name in manifest.files:
        with _opened(checkpoint / name) as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                if key in found:
                    raise InputError(
                        f"{checkpoint}: {found[key]} and {name} both have {key}; {_AGAIN}"
                    )
                found[key] = name
    return found


def read_tensors(
    checkpoint: Path, where: Mapping[str, str], names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Some tensors of a checkpoint; those that it does not have are left out.

    Args:
        checkpoint: the folder.
        where: from `tensor_names`.
        names: of the tensors.
    """
    for file_name in dict.fromkeys(where[name] for name in names if name in where):
        with _opened(checkpoint / file_name) as file:
            for name in names:
                if where.get(name) == file_name:
                    yield name, file.get_tensor(name)


def _opened(path: Path) -> Any:  # noqa: ANN401 - safe_open has no types
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise InputError(f"{path}: is not a safetensors file ({error}); {_AGAIN}") from error


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
