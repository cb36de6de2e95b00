"""`vigpipe checkpoint list|verify|export`: look at what a run has left."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tabulate import tabulate

from vigpipe.checkpoint.manifest import (
    checkpoints_at,
    read_manifest,
    read_tensors,
    tensor_names,
    verify,
)
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.errors import DONE, WRONG_INPUT, InputError


def table_of(run: Path) -> str:
    """The checkpoints of a run, newest first, by what their manifests say.

    Raises:
        InputError: there is none.
    """
    lines: list[tuple[str, ...]] = []
    for checkpoint in checkpoints_at(run):
        try:
            manifest = read_manifest(checkpoint)
        except InputError as error:
            lines.append((checkpoint.name, "", "", "", str(error)))
            continue
        size = sum(facts["bytes"] for facts in manifest.files.values())
        lines.append(
            (
                checkpoint.name,
                f"{manifest.step} of {manifest.num_steps}",
                "" if manifest.loss is None else f"{manifest.loss:.4f}",
                f"{size / 1e6:.1f} MB",
                f"{manifest.config.get('model')}, {manifest.layout.get('text')}",
            )
        )
    headers = ["checkpoint", "step", "loss", "size", "of"]
    return tabulate(lines, headers=headers, disable_numparse=True)


def verify_all(places: Sequence[Path], log: Callable[[str], None]) -> int:
    """Read every byte of checkpoints, or of all those of runs, and say what is wrong.

    Returns:
        Exit code: whether all are whole.

    Raises:
        InputError: no place is given, or one holds none.
    """
    if not places:
        raise InputError("vigpipe checkpoint verify: name checkpoints, or folders of runs")
    code = DONE
    for checkpoint in (found for place in places for found in checkpoints_at(place)):
        try:
            manifest = verify(checkpoint)
            num_tensors = len(tensor_names(checkpoint, manifest))
            log(f"{checkpoint}: whole, {num_tensors} tensors in {len(manifest.files)} files")
        except InputError as error:
            code = WRONG_INPUT
            log(str(error))
    return code


def export(place: Path, target: Path, ema: bool = False) -> Path:
    """Write the weights of a checkpoint, or of a run's newest one, as one file that says its model.

    Args:
        place: a checkpoint or a run.
        target: the .safetensors file.
        ema: write the moving average in place of the weights.

    Returns:
        The checkpoint.

    Raises:
        InputError: it is damaged, has no moving average, or the file cannot be written.
    """
    checkpoint = checkpoints_at(place)[0]
    manifest = verify(checkpoint)
    where = tensor_names(checkpoint, manifest)
    kind = "ema/" if ema else "model/"
    names = sorted(name for name in where if name.startswith(kind))
    if not names:
        raise InputError(f"{checkpoint}: has no {kind}… tensors; the run had no --ema")
    state = {k.removeprefix(kind): v for k, v in read_tensors(checkpoint, where, names)}
    if not all(isinstance(value, str) for value in manifest.weights.values()):
        raise InputError(f"{checkpoint}: what it says of its weights is no text")
    save_weights(target, state, manifest.weights)
    return checkpoint
