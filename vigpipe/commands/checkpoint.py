"""The commands `vigpipe checkpoint list|verify|export`: inspect the checkpoints of runs."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from tabulate import tabulate
from torch import Tensor

from vigpipe.checkpoint.best import best_checkpoint, best_in
from vigpipe.checkpoint.manifest import (
    Manifest,
    checkpoints_at,
    read_manifest,
    read_tensors,
    tensor_names,
    verify,
)
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.checkpoint.wide import WideModel, check_wide, export_wide
from vigpipe.config.choices import MODELS, Divided
from vigpipe.errors import DONE, WRONG_INPUT, InputError
from vigpipe.files.names import escaped
from vigpipe.files.outputs import check_new_file
from vigpipe.messages import one_line
from vigpipe.model.slicing import Slicing
from vigpipe.replication.subnetworks.draws import draw_channels
from vigpipe.replication.table import resumed_table


def table_of(run: Path) -> str:
    """Make a table of a run's checkpoints from their manifests, newest first."""
    lines: list[tuple[str, ...]] = []
    newest_best = None
    for checkpoint in checkpoints_at(run):
        try:
            manifest = read_manifest(checkpoint)
            newest_best = newest_best or best_in(manifest, checkpoint)
        except InputError as error:
            lines.append((checkpoint.name, "", "", "", one_line(str(error))))
            continue
        is_best = newest_best is not None and newest_best.step == manifest.step
        size = sum(facts["bytes"] for facts in manifest.files.values())
        step = f"{manifest.step} of {manifest.num_steps}"
        loss = "" if manifest.loss is None else f"{manifest.loss:.4f}"
        of = f"{manifest.config.get('model')}, {manifest.layout.get('text')}"
        of += f"; the best, {newest_best}" if is_best else ""
        lines.append((checkpoint.name, step, loss, f"{size / 1e6:.1f} MB", one_line(of)))
    headers = ["checkpoint", "step", "loss", "size", "of"]
    return tabulate(lines, headers=headers, disable_numparse=True)


def verify_all(places: Sequence[Path], log: Callable[[str], None]) -> int:
    """Read every byte of checkpoints, or of all those of a run, and log whether each is whole."""
    if not places:
        raise InputError("vigpipe checkpoint verify: name checkpoints, or folders of runs")
    code = DONE
    for checkpoint in (path for place in places for path in checkpoints_at(place)):
        try:
            manifest = verify(checkpoint)
            num_tensors = len(tensor_names(checkpoint, manifest))
            if _is_wide(manifest):
                check_wide(checkpoint, manifest, _wide_model(checkpoint, manifest))
            sentence = f"{checkpoint}: whole, {num_tensors} tensors in {len(manifest.files)} files"
        except InputError as error:
            code, sentence = WRONG_INPUT, str(error)
        log(one_line(sentence))
    return code


def export(
    place: Path, target: Path, *, ema: bool = False, best: bool = False, overwrite: bool = False
) -> str:
    """Write the weights of a checkpoint as one file, which also describes its model.

    The newest checkpoint of a run is taken; with `best`, its best one and what was scored of it.
    With `ema`, the moving average of the weights is written instead.
    """
    check_new_file(target, "", (".safetensors",), overwrite=overwrite)
    checkpoint, chosen_by = best_checkpoint(place) if best else (checkpoints_at(place)[0], None)
    ema = ema or (chosen_by is not None and chosen_by.of == "ema")
    manifest = verify(checkpoint)
    if not all(isinstance(value, str) for value in manifest.weights.values()):
        raise InputError(f"{checkpoint}: what it says of its weights is not text")
    where = tensor_names(checkpoint, manifest)
    kind = "ema/" if ema else "model/"
    names = sorted(name for name in where if name.startswith(kind))
    if not names:
        raise InputError(f"{checkpoint}: has no {kind}… tensors; the run had no --ema")
    if _is_wide(manifest):
        export_wide(checkpoint, manifest, target, _wide_model(checkpoint, manifest))
        what = "weights"
    else:
        state = {k.removeprefix(kind): v for k, v in read_tensors(checkpoint, where, names)}
        save_weights(target, state, manifest.weights)
        what = "moving average" if ema else "weights"
    why = f", the best by {chosen_by}" if chosen_by else ""
    return f"{target}: {what} of {checkpoint}{why}"


def _is_wide(manifest: Manifest) -> bool:
    return manifest.config.get("strategy") == "subnetworks"


def _wide_model(checkpoint: Path, manifest: Manifest) -> WideModel:
    """Describe the wide model that sub-networks have trained a part of each."""
    slicing, like = _slicing(checkpoint, manifest)
    config, progress = manifest.config, manifest.replicas.get("progress", {})
    taken, numbers = progress.get("taken"), [config.get(n, 0) for n in ("seed", "average_every")]
    num = len(taken) if isinstance(taken, list) else 0
    try:
        table = resumed_table(progress, num)
        if not num or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise ValueError("its seed, --average-every or --dp is not a number")
    except ValueError as error:
        raise InputError(
            f"{checkpoint}: its entry of the replicas is malformed: {error}; give another "
            "checkpoint"
        ) from error
    seed, every = numbers
    round_index = table.joined[0]
    draws = cache(partial(draw_channels, slicing.sizes, num, seed, round_index))

    def chosen(group: str, replica: int) -> Tensor:
        return draws()[replica][group]

    is_new = table.taken[0] == round_index * every
    return WideModel(slicing, like, num, None if is_new else chosen)


def _slicing(checkpoint: Path, manifest: Manifest) -> tuple[Slicing, dict[str, Tensor]]:
    """Return which sides of the wide model's tensors are divided, and these on meta."""
    from vigpipe.inference.description import describe_image_model
    from vigpipe.inference.graph_description import describe_graph_model

    model, divided = manifest.weights.get("model", ""), manifest.config.get("divided") or "inner"
    with torch.device("meta"):
        if model not in MODELS:
            graph_model = describe_graph_model(manifest.weights, checkpoint).build()
            slicing = graph_model.slicing(manifest.config.get("partition_input") is True)
            return slicing, graph_model.state_dict()
        wide: Any = describe_image_model(manifest.weights, model, checkpoint).build()
    try:
        if divided not in (choices := get_args(Divided)):
            raise ValueError(f"expected {' or '.join(choices)}")
        return wide.slicing(divided=divided), wide.state_dict()
    except ValueError as error:
        raise InputError(
            f"{checkpoint}: gives --divided as {escaped(str(divided), 40)}: {error}; give another "
            "checkpoint"
        ) from error
