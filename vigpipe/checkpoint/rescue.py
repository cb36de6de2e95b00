"""Save the state of a run in which a rank has died: the other replicas hold all that it held.

No rank steps its optimizer before all ranks have agreed to, so the ranks that lose a peer are at
the end of the same step, or some of them at the end of the next one. Each of them writes the whole
state of its stages, with its own manifest:

    .rescue-00000073-9f3c/stage0-replica1.safetensors, stage0-replica1.json

The ranks can no longer agree on whether that is enough. The next start finds out: if every stage is
there, the folder becomes a checkpoint like any other.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vigpipe.checkpoint.manifest import (
    NAME,
    Manifest,
    file_facts,
    folder_name,
    read_manifest_file,
    write_note,
)
from vigpipe.checkpoint.weights_file import write_tensors
from vigpipe.errors import InputError

PREFIX = ".rescue-"


def rescue(
    folder: Path, token: str, own_file: str, manifest: Manifest, state: Mapping[str, Tensor]
) -> None:
    """Write the state of this rank's stages; errors are ignored, because the run ends anyway.

    Args:
        folder: the folder of the run's checkpoints.
        token: the run's token, as for `Saver`.
        own_file: name of this rank's file.
        manifest: the facts of the checkpoint; its files are filled in here.
        state: everything that the stages need, not only a replica's share of it.
    """
    place = folder / f"{PREFIX}{manifest.step:08d}-{token}"
    with contextlib.suppress(OSError, InputError):
        place.mkdir(parents=True, exist_ok=True)
        path = place / own_file
        write_tensors(path, {name: t.detach().cpu().contiguous() for name, t in state.items()})
        write_note(path, replace(manifest, files={own_file: file_facts(path)}).text())


def salvage(run: Path) -> None:
    """Turn what ranks saved when they lost a peer into checkpoints, if every stage is there.

    Call this only while no rank of the run is running.

    Args:
        run: the folder of the run.
    """
    folder = run / "checkpoints"
    for place in sorted(folder.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, InputError):
            _complete(place, folder)


def _complete(place: Path, folder: Path) -> None:
    chosen: dict[int, Manifest] = {}  # by pipeline_rank
    for note in sorted(place.glob("stage*-replica*.json")):
        manifest = read_manifest_file(note)
        pipeline_rank = int(re.findall("[0-9]+", note.name)[0])
        if chosen.setdefault(pipeline_rank, manifest).step != manifest.step:
            raise InputError(f"{place}: its files are of different steps")
    if not chosen:
        return
    any_manifest = next(iter(chosen.values()))
    pipeline_size = any_manifest.layout.get("num_stages")
    target = folder / folder_name(any_manifest.step)
    if len(chosen) != pipeline_size or max(chosen) >= len(chosen) or target.exists():
        return
    files = {name: facts for manifest in chosen.values() for name, facts in manifest.files.items()}
    complete = replace(chosen[max(chosen)], files=files)  # only the last stage knows the loss
    (place / NAME).write_text(complete.text(), encoding="utf-8")
    for path in place.iterdir():
        if path.name not in files and path.name != NAME:
            path.unlink()
    place.rename(target)
