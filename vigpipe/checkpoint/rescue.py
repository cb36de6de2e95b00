"""Save the state of a run in which a rank has died: the others hold all that it held, or enough.

Where all replicas take every step together, no rank steps its optimizer before all ranks have
agreed to, so the ranks that lose a peer are at the end of the same step, or some of them at the end
of the next one. Each of them writes the whole state of its stages, with its own manifest:

    .rescue-00000073-9f3c/stage0-replica1.safetensors, stage0-replica1.json

Where replicas take steps of their own, and go on without a lost one, that is done when they have
lost the store where they have met. They are at different steps then. Each writes what it has, with
the table of all replicas as it has seen it last, and the rows that it has told of since the last
checkpoint; with a server, only the server does:

    .rescue-9f3c/stage0-replica1.safetensors, stage0-replica1.json, stage0-replica1.rows

The ranks can no longer agree on whether that is enough. The next start finds out: if every stage is
there, the folder becomes a checkpoint like any other.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vigpipe.checkpoint.manifest import NAME, Manifest, file_facts, folder_name, read_manifest
from vigpipe.checkpoint.weights_file import write_tensors
from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing, write_atomically
from vigpipe.files.rows import as_line
from vigpipe.replication.table import progress_of_those_left
from vigpipe.run.folder import CHECKPOINTS, EVENTS, METRICS

PREFIX = ".rescue-"
_ROWS = ".rows"


def rescue(
    folder: Path,
    token: str,
    own_file: str,
    manifest: Manifest,
    state: Mapping[str, Tensor],
    parcels: Sequence[Mapping[str, Any]] | None = None,
) -> bool:
    """Write the whole state of this rank's stages; say if it succeeded, as the run ends anyway.

    The parcels have rows of the run's files that this rank has told of; they are None if all
    replicas took every step together.
    """
    step = "" if parcels is not None else f"{manifest.step:08d}-"
    place = folder / f"{PREFIX}{step}{token}"
    with contextlib.suppress(OSError, InputError):
        place.mkdir(parents=True, exist_ok=True)
        path = place / own_file
        write_tensors(path, {name: t.detach().cpu().contiguous() for name, t in state.items()})
        if parcels is not None:
            path.with_suffix(_ROWS).write_text(json.dumps(parcels), encoding="utf-8")
        note = replace(manifest, files={own_file: file_facts(path)}).text()
        write_atomically(path.with_suffix(".json"), note)
        return True
    return False


def salvage(run: Path) -> None:
    """Turn what ranks saved when they lost a peer into checkpoints; none of them may be running."""
    for place in sorted((run / CHECKPOINTS).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, ValueError):  # also InputError
            _complete(place, run)


def _complete(place: Path, run: Path) -> None:
    """Give the folder its manifest and the name of a checkpoint, unless a stage is missing."""
    # Of each replica, or copy of it, the manifests by pipeline rank.
    replicas: dict[int, dict[int, Manifest]] = {}
    for note in sorted(place.glob("stage*-replica*.json")):
        pipeline_rank, replica = map(int, re.findall("[0-9]+", note.name))
        replicas.setdefault(replica, {})[pipeline_rank] = read_manifest(place, note.name)
    if not replicas:
        return
    all_manifests = [m for stages in replicas.values() for m in stages.values()]
    are_equal = not any(m.replicas for m in all_manifests)
    if are_equal:  # one of them can stand for another
        replicas = {0: {p: m for stages in reversed(replicas.values()) for p, m in stages.items()}}
        if len({m.step for m in all_manifests}) > 1:
            raise InputError(f"{place}: its files are of different steps")
    chosen = _whole(replicas)
    if not chosen:
        return
    # Only the last stage knows the loss.
    manifest = chosen[0][max(chosen[0])] if are_equal else _of_those_left(chosen, place, run)
    target = place.with_name(folder_name(manifest.step))
    if target.exists():
        return
    manifests = [m for stages in chosen.values() for m in stages.values()]
    files = {name: facts for m in manifests for name, facts in m.files.items()}
    (place / NAME).write_text(replace(manifest, files=files).text(), encoding="utf-8")
    for path in place.iterdir():
        if path.name not in files and path.name != NAME:
            path.unlink()
    place.rename(target)


def _whole(replicas: Mapping[int, Mapping[int, Manifest]]) -> dict[int, Mapping[int, Manifest]]:
    """Choose one replica of each team of which all stages are there."""
    chosen: dict[int, Mapping[int, Manifest]] = {}
    for replica, stages in sorted(replicas.items()):
        manifest = next(iter(stages.values()))
        if len(stages) == manifest.layout.get("num_stages") and max(stages) < len(stages):
            taken = manifest.replicas.get("progress", {}).get("taken") or [0]
            of_replica = manifest.config.get("shards", 1)
            team_size = max(manifest.config.get("dp", 1) * of_replica // len(taken), 1)
            chosen.setdefault(replica // team_size, stages)
    return chosen


def _of_those_left(
    chosen: Mapping[int, Mapping[int, Manifest]], place: Path, run: Path
) -> Manifest:
    """Put together what the replicas have known, and write the rows that they have told of."""
    seen = {team: stages[0].replicas["progress"] for team, stages in chosen.items()}
    newest = chosen[max(seen, key=lambda team: seen[team]["version"])]
    progress = progress_of_those_left(seen, len(seen[max(seen)]["taken"]))
    files = sorted(place.glob(f"*{_ROWS}"))
    parcels = [parcel for file in files for parcel in json.loads(file.read_text("utf-8"))]
    sizes = {
        "metrics_bytes": _append(run / METRICS, (r for p in parcels for r in p["metrics"])),
        "events_bytes": _append(run / EVENTS, (r for p in parcels for r in p["events"])),
    }
    return replace(newest[max(newest)], replicas={"progress": progress, **sizes})


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Append the rows that a file lacks after its last whole line; return the file's size."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    known = set(whole)
    content = b"".join([*whole, *(line for line in map(as_line, rows) if line not in known)])
    with replacing(path) as partial:
        partial.write_bytes(content)
    return len(content)
