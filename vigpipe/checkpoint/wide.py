"""Put together the weights of a wide model from what independent sub-networks hold of it.

Replica j of m owns 1/m of the stored rows, as they were when the round began, and has trained
sub-model j since. In a checkpoint these are rows/NAME and model/NAME, under replicaJ/ as the rest
of its state. Nothing is whole in memory: all tensors are mapped.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from vigpipe.checkpoint.manifest import Manifest
from vigpipe.checkpoint.state import replica_prefix
from vigpipe.checkpoint.weights_file import save_rows
from vigpipe.errors import InputError
from vigpipe.model import mapped
from vigpipe.model.mapped import Shapes
from vigpipe.model.slicing import Slicing, runs

Chosen = Callable[[str, int], Tensor]  # (group, sub-model) -> its channels, ascending int64

_NUMBERS_AT_ONCE = 1 << 20


def export_wide(
    checkpoint: Path,
    manifest: Manifest,
    path: Path,
    slicing: Slicing,
    num: int,
    chosen: Chosen | None,
) -> None:
    """Write the wide model's weights from a checkpoint of its `num` sub-models.

    `chosen` is None if no step of the round has been taken, so that the rows are the whole model.
    """
    found: dict[str, Tensor] = {}
    for name in manifest.files:
        found |= mapped.open(checkpoint / name, writes_file=False)
    parts, rows = (
        [_of(found, f"{replica_prefix(j)}{kind}/") for j in range(num)]
        for kind in ("model", "rows")
    )
    shapes = wide_shapes(slicing, parts, rows, str(checkpoint))
    with save_rows(path, shapes, manifest.weights) as targets:
        assemble(targets, slicing, parts, rows, chosen)


def _of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def wide_shapes(
    slicing: Slicing,
    parts: Sequence[Mapping[str, Tensor]],
    rows: Sequence[Mapping[str, Tensor]],
    where: str,
) -> Shapes:
    """Return dtypes and shapes of a wide model; InputError if a sub-model or rows do not fit."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, sides in slicing.sides.items():
        dim = slicing.owned(name)
        first = (parts if dim is None else rows)[0].get(name)
        whole = () if first is None else tuple(first.shape)
        if len(whole) == len(sides):
            whole = tuple(
                length if side is None else side.length(slicing.sizes[side.group])
                for length, side in zip(whole, sides, strict=True)
            )
            owned = tuple(n // len(rows) if i == dim else n for i, n in enumerate(whole))
            narrow = slicing.shape(name, whole, len(parts))
        else:
            owned = narrow = None
        holders = [("model", narrow, parts)]
        holders += [] if dim is None else [("rows", owned, rows)]
        for kind, expected, all_of_kind in holders:
            for j, tensors in enumerate(all_of_kind):
                tensor = tensors.get(name)
                if tensor is None or tuple(tensor.shape) != expected:
                    what = "is missing" if tensor is None else f"is {tuple(tensor.shape)}"
                    raise InputError(
                        f"{where}: {replica_prefix(j)}{kind}/{name} {what}, expected "
                        f"{expected or 'another shape'}; give a checkpoint of this model"
                    )
        assert first is not None
        shapes[name] = first.dtype, whole
    return shapes


def assemble(
    targets: Mapping[str, Tensor],
    slicing: Slicing,
    parts: Sequence[Mapping[str, Tensor]],
    rows: Sequence[Mapping[str, Tensor]],
    chosen: Chosen | None,
) -> None:
    """Fill a wide model's tensors: the stored rows, and over them what the sub-models have.

    A tensor without rows is the mean over the sub-models; integers are those of the first one.
    """
    for name, target in targets.items():
        dim = slicing.owned(name)
        if dim is None:
            mean = name.replace("running_var", "running_mean")
            means = [tensors[mean] for tensors in parts] if mean != name else []
            _average(target, [tensors[name] for tensors in parts], means)
            continue
        for owner, tensors in enumerate(rows):
            at = 0
            for first, count in runs(slicing.owned_entries(name, len(rows), owner)):
                target.narrow(dim, first, count).copy_(tensors[name].narrow(dim, at, count))
                at += count
        for j, tensors in enumerate(parts if chosen is not None else ()):
            assert chosen is not None
            entries = [
                None
                if side is None
                else side.entries(chosen(side.group, j), slicing.sizes[side.group])
                for side in slicing.sides[name]
            ]
            mapped.put_entries(target, tensors[name], entries)


def _average(target: Tensor, parts: Sequence[Tensor], means: Sequence[Tensor]) -> None:
    """Write the mean over sub-models; variances, which have `means`, gain the variance of these."""
    if not target.is_floating_point():
        target.copy_(parts[0])
        return
    for first in range(0, target.numel(), _NUMBERS_AT_ONCE):
        some = slice(first, first + _NUMBERS_AT_ONCE)
        mean = _mean_of([part.view(-1)[some].double() for part in parts])
        if means:
            of_each = [part.view(-1)[some].double() for part in means]
            middle = _mean_of(of_each)
            mean += _mean_of([(m - middle).square() for m in of_each])
        target.view(-1)[some] = mean


def _mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, tensors) / len(tensors)
