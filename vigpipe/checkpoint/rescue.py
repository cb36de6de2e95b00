"""When a rank dies, the replicas that are left have all that it had: they save it before they end.

No rank steps its optimizer before all have agreed to, so the ranks that lose a peer are at the end
of the same step, or some of them of the next one. Each writes the whole state of its stage, with a
manifest of its own:

    .rescue-00000073-9f3c/stage0-replica1.safetensors, stage0-replica1.json

Nobody can be asked any more whether that is enough. The next start finds out: if every stage is
there, the folder becomes a checkpoint like all others.
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
    folder: Path, token: str, own: str, manifest: Manifest, state: Mapping[str, Tensor]
) -> None:
    """Write the state of this rank's stage; a full disk makes no difference to how the run ends.

    Args:
        folder: where the run's checkpoints are.
        token: of the run.
        own: name of this rank's file.
        manifest: what the state is of.
        state: everything the stage needs, not a share of it.
    """
    place = folder / f"{PREFIX}{manifest.step:08d}-{token}"
    with contextlib.suppress(OSError, InputError):
        place.mkdir(parents=True, exist_ok=True)
        path = place / own
        write_tensors(path, {name: t.detach().cpu().contiguous() for name, t in state.items()})
        write_note(path, replace(manifest, files={own: file_facts(path)}).text())


def salvage(run: Path) -> None:
    """Make checkpoints of what the ranks of a run saved when they lost a peer, where it is enough.

    Only while no rank of the run is at work.
    """
    folder = run / "checkpoints"
    for place in sorted(folder.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, InputError):
            _complete(place, folder)


def _complete(place: Path, folder: Path) -> None:
    chosen: dict[int, Manifest] = {}
    for note in sorted(place.glob("stage*-replica*.json")):
        manifest = read_manifest_file(note)
        stage = int(re.findall("[0-9]+", note.name)[0])
        if chosen.setdefault(stage, manifest).step != manifest.step:
            raise InputError(f"{place}: its files are of different steps")
    if not chosen:
        return
    some = next(iter(chosen.values()))
    num_stages = some.layout.get("num_stages")
    target = folder / folder_name(some.step)
    if set(chosen) != set(range(num_stages or 0)) or target.exists():
        return
    files = {name: facts for manifest in chosen.values() for name, facts in manifest.files.items()}
    whole = replace(chosen[max(chosen)], files=files)  # the last stage knows the loss
    (place / NAME).write_text(whole.text(), encoding="utf-8")
    for path in place.iterdir():
        if path.name not in files and path.name != NAME:
            path.unlink()
    place.rename(target)
