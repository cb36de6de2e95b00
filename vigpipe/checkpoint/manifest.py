"""Write and check the manifest of a checkpoint: the facts of the run and a checksum of every file.

    {"format": "vigpipe checkpoint 3",
     "sha256": SHA-256 of "checkpoint" as JSON with sorted keys,
     "checkpoint": {"step": 50, "files": {NAME: {"bytes": ..., "sha256": ...}}, ...}}

Readers of safetensors and JSON detect a truncated file; only a checksum detects a flipped bit.
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
from vigpipe.files.untrusted import check_name, file_digest, read_json

FORMAT = "vigpipe checkpoint 3"
# Older formats, which are still read, with what they lack: --keep-best, and replicas that differ.
_OLDER = {"vigpipe checkpoint 1": ("best", "replicas"), "vigpipe checkpoint 2": ("replicas",)}
NAME = "manifest.json"
_FOLDER = re.compile(r"step-([0-9]{8,18})")
_FILE = re.compile(r"stage[0-9]+-replica[0-9]+\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_AGAIN = "give another checkpoint"
MOST_STEPS = 10**15  # more than a run can take: steps of an epoch times epochs
_MOST_FILE_BYTES = 1 << 60


@dataclass(frozen=True)
class Manifest:
    """The facts of a checkpoint."""

    step: int  # number of optimizer steps done
    num_steps: int  # of the whole run
    evaluated: bool  # whether the evaluation that follows this step, if any, has been done
    loss: float | None  # of the last step; None if it was skipped
    config: dict[str, Any]  # as in config.toml
    data: dict[str, Any]  # from `Run.fingerprint`, and what was read, from `Feed.progress`
    layout: dict[str, Any]  # of the ranks that wrote the checkpoint
    weights: dict[str, str]  # from `Run.weights_metadata`
    versions: dict[str, Any]
    best: dict[str, Any] = field(default_factory=dict)  # from `Best.as_table`
    # Where replicas take steps of their own, "progress", from `OwnSteps.progress`, and
    # "metrics_bytes" and "events_bytes", the sizes of metrics.jsonl and events.jsonl then.
    replicas: dict[str, Any] = field(default_factory=dict)
    # "bytes" and "sha256" of every file, by its name.
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def text(self) -> str:
        content = asdict(self)
        return json.dumps(
            {"format": FORMAT, "sha256": _digest(content), "checkpoint": content}, indent=1
        )


def folder_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run, or of its folder `checkpoints`, newest first."""
    for place in (folder / "checkpoints", folder):
        try:
            names = [entry.name for entry in os.scandir(place) if entry.is_dir()]
        except OSError:
            continue
        by_step = {int(m[1]): place / m[0] for m in map(_FOLDER.fullmatch, names) if m}
        if by_step:
            return [by_step[step] for step in sorted(by_step, reverse=True)]
    return []


def checkpoints_at(place: Path, option: str = "") -> list[Path]:
    """List a run's checkpoints, newest first, or the one named; `option` begins the InputError."""
    check_name(place)
    if (place / NAME).exists():
        return [place]
    if checkpoints := list_checkpoints(place):
        return checkpoints
    if not place.is_dir():
        raise InputError(f"{option}{place}: is not a folder; name a run or one of its checkpoints")
    raise InputError(
        f"{option}{place}: holds no checkpoints; name a run that has some, or one of them"
    )


def read_manifest(checkpoint: Path, name: str = NAME) -> Manifest:
    """Read and check the manifest of a checkpoint; InputError if it is missing or damaged."""
    path = checkpoint / name
    table = read_json(path)
    if not isinstance(table, dict) or table.get("format") not in (FORMAT, *_OLDER):
        actual = table.get("format") if isinstance(table, dict) else None
        raise InputError(f"{path}: expected the format {FORMAT!r}, got {actual!r}; {_AGAIN}")
    content = table.get("checkpoint")
    if not isinstance(content, dict) or table.get("sha256") != _digest(content):
        raise InputError(f"{path}: its SHA-256 does not fit: it was damaged or edited; {_AGAIN}")
    for key in _OLDER.get(table["format"], ()):
        content.setdefault(key, {})
    names = {f.name for f in fields(Manifest)}
    if content.keys() != names:
        wrong = sorted(content.keys() ^ names)
        raise InputError(f"{path}: has other keys than a checkpoint ({', '.join(wrong)}); {_AGAIN}")
    for key in ("config", "data", "layout", "weights", "versions", "best", "replicas", "files"):
        if not isinstance(content[key], dict):
            raise InputError(f"{path}: {key} is not a table; {_AGAIN}")
    for key in ("step", "num_steps"):
        if type(content[key]) is not int or not 0 <= content[key] <= MOST_STEPS:
            raise InputError(f"{path}: {key} is not a count of steps: {content[key]!r}; {_AGAIN}")
    if content["step"] > content["num_steps"]:
        raise InputError(
            f"{path}: step is {content['step']} of {content['num_steps']} steps; {_AGAIN}"
        )
    if not isinstance(content["evaluated"], bool):
        raise InputError(f"{path}: evaluated is neither true nor false; {_AGAIN}")
    loss = content["loss"]
    if loss is not None and (type(loss) not in (float, int) or not abs(loss) <= 1e300):
        raise InputError(f"{path}: loss is not a number: {loss!r}; {_AGAIN}")
    if (replicas := content["replicas"]) and not (
        replicas.keys() == {"progress", "metrics_bytes", "events_bytes"}
        and isinstance(replicas["progress"], dict)
        and all(
            type(replicas[key]) is int and 0 <= replicas[key] <= _MOST_FILE_BYTES
            for key in ("metrics_bytes", "events_bytes")
        )
    ):
        raise InputError(f"{path}: its entry of the replicas is malformed; {_AGAIN}")
    if not content["files"]:
        raise InputError(f"{path}: names no files; {_AGAIN}")
    for file_name, facts in content["files"].items():
        _check_file_entry(path, file_name, facts)
    return Manifest(**content)


def _check_file_entry(path: Path, name: str, facts: object) -> None:
    is_valid = (
        _FILE.fullmatch(name)  # It is not a path to another folder.
        and isinstance(facts, dict)
        and facts.keys() == {"bytes", "sha256"}
        and type(facts["bytes"]) is int
        and 0 <= facts["bytes"] <= _MOST_FILE_BYTES
        and isinstance(facts["sha256"], str)
        and _SHA256.fullmatch(facts["sha256"])
    )
    if not is_valid:
        raise InputError(f"{path}: its entry of the file {name!r} is malformed; {_AGAIN}")


def verify(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest, with which every byte agrees, or raise InputError."""
    manifest = read_manifest(checkpoint)
    for name, facts in manifest.files.items():
        path = checkpoint / name
        size, digest = file_digest(path)
        if size != facts["bytes"]:
            raise InputError(f"{path}: has {size} bytes, expected {facts['bytes']}; {_AGAIN}")
        if digest != facts["sha256"]:
            raise InputError(f"{path}: its SHA-256 does not fit the manifest's; {_AGAIN}")
    return manifest


def file_facts(path: Path) -> dict[str, Any]:
    """Return the entry of a file for `Manifest.files`."""
    size, digest = file_digest(path)
    return {"bytes": size, "sha256": digest}


def tensor_names(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """Return the name of the file that holds each tensor; InputError if two hold the same one."""
    file_of: dict[str, str] = {}
    for name in manifest.files:
        with _opened(checkpoint / name) as file:
            for key in file.keys():  # noqa: SIM118 - it is not a dict
                if key in file_of:
                    raise InputError(
                        f"{checkpoint}: {file_of[key]} and {name} both have {key}; {_AGAIN}"
                    )
                file_of[key] = name
    return file_of


def read_tensors(
    checkpoint: Path, file_of: Mapping[str, str], names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield those of the named tensors that a checkpoint has, found by `tensor_names`."""
    for file_name in dict.fromkeys(file_of[name] for name in names if name in file_of):
        with _opened(checkpoint / file_name) as file:
            for name in names:
                if file_of.get(name) == file_name:
                    yield name, file.get_tensor(name)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise InputError(f"{path}: is not a safetensors file ({error}); {_AGAIN}") from error


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
