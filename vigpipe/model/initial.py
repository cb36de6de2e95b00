"""Initial weights of a wide model that nobody holds as a whole.

What a model's constructor does to its weights is watched on the meta device, where they take no
memory. Any rank can then fill any part of any tensor: the numbers are drawn in tiles, and those of
a tile depend only on the seed, the name of the tensor and the position of the tile.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vigpipe.model.slicing import runs

TILE = 512  # rows and columns of a tile, which is drawn from one state of the generator

_AT = torch.ops.aten
_ZEROS = (_AT.zeros, _AT.zeros_like, _AT.new_zeros, _AT.zero_)
_ONES = (_AT.ones, _AT.ones_like, _AT.new_ones)


@dataclass(frozen=True)
class Draw:
    """How a tensor is filled when a model is made."""

    rule: Literal["constant", "uniform", "normal"]
    values: tuple[float, ...]  # the number; lower and upper bound; or mean and standard deviation

    def fill(
        self,
        target: Tensor,
        name: str,
        seed: int,
        whole: Sequence[int],
        dim: int | None = None,
        entries: Tensor | None = None,
    ) -> None:
        """Fill a part of a tensor with the numbers that filling the whole tensor gives it.

        Numbers depend on seed and name. They are drawn in float32, so that they are the same in
        every dtype but for rounding. The target is contiguous; its shape differs from `whole`, that
        of the whole tensor, in `dim` only, of which it has the `entries`, ascending, int64.
        """
        if self.rule == "constant":
            target.detach().fill_(self.values[0])
            return
        rows, columns = (whole[0] if whole else 1), math.prod(whole[1:])
        row_runs, column_runs = [(0, rows)], [(0, columns)]
        if dim == 0:
            assert entries is not None
            row_runs = runs(entries)
        elif dim is not None:
            assert entries is not None
            stride, length = math.prod(whole[dim + 1 :]), whole[dim]
            column_runs = [
                ((i * length + first) * stride, count * stride)
                for i in range(math.prod(whole[1:dim]))
                for first, count in runs(entries)
            ]
        if not target.numel():
            return
        flat = target.detach().view(sum(count for _, count in row_runs), -1)
        memory = torch.empty(TILE * TILE, dtype=torch.float32, device="cpu")
        generator = torch.Generator()
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        tiles_across, first_seed = -(-columns // TILE), int.from_bytes(digest[:8], "little")
        for i, row_pieces in _pieces(row_runs):
            for j, column_pieces in _pieces(column_runs):
                shape = min(TILE, rows - i * TILE), min(TILE, columns - j * TILE)
                tile = memory[: shape[0] * shape[1]]
                # The generator uses only 32 bits of a seed; no two tiles of a tensor share these.
                generator.manual_seed((first_seed + i * tiles_across + j) % (1 << 32))
                fill = tile.uniform_ if self.rule == "uniform" else tile.normal_
                fill(*self.values, generator=generator)
                drawn_tile = tile.view(shape)
                for tile_rows, flat_rows in row_pieces:
                    for tile_columns, flat_columns in column_pieces:
                        flat[flat_rows, flat_columns] = drawn_tile[tile_rows, tile_columns]


def _pieces(entry_runs: list[tuple[int, int]]) -> Iterator[tuple[int, list[tuple[slice, slice]]]]:
    """Cut runs at the borders of tiles: each piece's entries in its tile, and in the target."""
    cut: list[tuple[int, slice, slice]] = []
    at = 0
    for first, count in entry_runs:
        end = first + count
        while first < end:
            tile, start = divmod(first, TILE)
            length = min(end - first, TILE - start)
            cut.append((tile, slice(start, start + length), slice(at, at + length)))
            first, at = first + length, at + length
    for tile, pieces in groupby(cut, key=lambda piece: piece[0]):
        yield tile, [piece[1:] for piece in pieces]


def drawn(make: Callable[[], nn.Module]) -> dict[str, Draw | None]:
    """Find out how the tensors of the model that `make` makes are filled last, without memory.

    By name in the state dict; None for one that was computed, or filled in parts.
    """
    with torch.device("meta"), _Watch() as watch:
        model = make()
    return {name: watch.last_draw(tensor) for name, tensor in model.state_dict().items()}


class _Watch(TorchDispatchMode):
    """Remembers how each storage was filled last."""

    def __init__(self) -> None:
        super().__init__()
        # Keeping a storage keeps its address from being used for another one.
        self._found: dict[int, tuple[torch.UntypedStorage, Draw | None]] = {}

    def last_draw(self, tensor: Tensor) -> Draw | None:
        storage, draw = self._found.get(tensor.untyped_storage()._cdata, (None, None))
        return draw if storage is not None and storage.nbytes() == tensor.nbytes else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        draw = _draw_of(func.overloadpacket, args, kwargs or {})
        if draw is not None:
            self._note(result, draw)
        elif func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info and argument.alias_info.is_write:
                    self._note(value, None)
        return result

    def _note(self, tensor: Tensor, draw: Draw | None) -> None:
        storage = tensor.untyped_storage()
        is_all = storage.nbytes() == tensor.nbytes
        self._found[storage._cdata] = storage, draw if is_all else None


def _draw_of(operator: object, args: Sequence[Any], kwargs: dict[str, Any]) -> Draw | None:
    """Return what an operator fills its result with; None if that is not known."""
    if operator in _ZEROS:
        return Draw("constant", (0.0,))
    if operator in _ONES:
        return Draw("constant", (1.0,))
    if operator in (_AT.fill_, _AT.full, _AT.full_like) and not isinstance(args[1], Tensor):
        return Draw("constant", (float(args[1]),))
    if operator is _AT.uniform_:
        return Draw("uniform", _numbers(args, kwargs, {"from": 0.0, "to": 1.0}))
    if operator is _AT.normal_:
        return Draw("normal", _numbers(args, kwargs, {"mean": 0.0, "std": 1.0}))
    return None


def _numbers(
    args: Sequence[Any], kwargs: dict[str, Any], defaults: dict[str, float]
) -> tuple[float, ...]:
    given = dict(zip(defaults, args[1:], strict=False)) | kwargs
    return tuple(float(given.get(name, default)) for name, default in defaults.items())
