"""Put together the weights of a wide model from what independent sub-networks hold of it.

Replica j of m owns 1/m of the stored rows, as they were when the round began, and has trained
sub-model j since. In a checkpoint these are rows/NAME and model/NAME, under replicaJ/ as the rest
of its state. Nothing is whole in memory: all tensors are mapped.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vigpipe.checkpoint.manifest import Manifest
from vigpipe.checkpoint.state import replica_prefix
from vigpipe.checkpoint.weights_file import save_rows
from vigpipe.errors import InputError
from vigpipe.model import mapped
from vigpipe.model.mapped import Shapes
from vigpipe.model.slicing import Slicing, runs
from vigpipe.replication.subnetworks.moments import is_moment

Chosen = Callable[[str, int], Tensor]  # (group, sub-model) -> its channels, ascending int64

_NUMBERS_AT_ONCE = 1 << 20


class WideModel(NamedTuple):
    """What a checkpoint says of the wide model of its sub-models."""

    slicing: Slicing
    like: Mapping[str, Tensor]  # its state dict, maybe on meta
    num: int  # of sub-models
    chosen: Chosen | None  # None if no step of the round was taken: the rows are the whole model


def export_wide(checkpoint: Path, manifest: Manifest, path: Path, wide: WideModel) -> None:
    """Write the wide model's weights from a checkpoint of its sub-models."""
    parts, rows = _parts_and_rows(checkpoint, manifest, wide.num)
    shapes = wide_shapes(wide, parts, rows, str(checkpoint))
    with save_rows(path, shapes, manifest.weights) as targets:
        assemble(targets, wide.slicing, parts, rows, wide.chosen)


def check_wide(checkpoint: Path, manifest: Manifest, wide: WideModel) -> None:
    """Raise InputError if what a checkpoint's sub-models hold is not all of the wide model."""
    wide_shapes(wide, *_parts_and_rows(checkpoint, manifest, wide.num), str(checkpoint))


def _parts_and_rows(
    checkpoint: Path, manifest: Manifest, num: int
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    found: dict[str, Tensor] = {}
    for name in manifest.files:
        found |= mapped.open(checkpoint / name, writes_file=False)
    parts, rows = (
        [_of(found, f"{replica_prefix(j)}{kind}/") for j in range(num)]
        for kind in ("model", "rows")
    )
    return parts, rows


def _of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def wide_shapes(
    wide: WideModel,
    parts: Sequence[Mapping[str, Tensor]],
    rows: Sequence[Mapping[str, Tensor]],
    where: str,
) -> Shapes:
    """Return dtypes and shapes of a wide model; InputError if a sub-model or rows do not fit.

    The moments of a weight that are stored with its rows must be as these are.
    """
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    moments = {name for of_owner in rows for name in of_owner if is_moment(name)}
    for name, like in wide.like.items():
        whole, dim = tuple(like.shape), wide.slicing.owned(name)
        narrow = wide.slicing.shape(name, whole, wide.num)
        dtype = _dtype(like, [of_one.get(name) for of_one in (*parts, *rows)])
        holders = [("model", name, dtype, narrow, parts)]
        if dim is not None:
            owned = tuple(n // wide.num if i == dim else n for i, n in enumerate(whole))
            holders.append(("rows", name, dtype, owned, rows))
            for moment in sorted(m for m in moments if m.split("/", 2)[-1] == name):
                its_dtype = _dtype(like, [of_one.get(moment) for of_one in rows])
                holders.append(("rows", moment, its_dtype, owned, rows))
        for kind, stored, its_dtype, shape, tensors in holders:
            for j, of_one in enumerate(tensors):
                tensor = of_one.get(stored)
                actual = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
                if actual != (its_dtype, shape):
                    what = "is missing" if actual is None else f"is {_text(*actual)}"
                    raise InputError(
                        f"{where}: {replica_prefix(j)}{kind}/{stored} {what}, expected "
                        f"{_text(its_dtype, shape)}; give a checkpoint of this model"
                    )
        shapes[name] = dtype, whole
    return shapes


def _dtype(like: Tensor, found: Sequence[Tensor | None]) -> torch.dtype:
    """Return the first dtype that is there of the same kind as that of the model."""
    dtypes = (t.dtype for t in found if t is not None)
    is_float = like.is_floating_point()
    return next((d for d in dtypes if d.is_floating_point == is_float), like.dtype)


def _text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"


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
