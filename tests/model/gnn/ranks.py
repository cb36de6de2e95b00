"""Ranks as threads of this process, each with its blocks of a wide model's channels."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor, nn

from vigpipe.model.slicing import Slicing


class Threads:
    """The `Columns` of one of some threads."""

    def __init__(self, place: int, barrier: Barrier, given: list[Any]) -> None:
        self.place, self.size, self._barrier, self._given = place, len(given), barrier, given

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._given[self.place] = tensor.clone()
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        assert {t.shape for t in given} == {tensor.shape}
        return given

    def from_(self, source: int, block: Tensor) -> Tensor:
        return self._all(block)[source]

    def total(self, part: Tensor) -> Tensor:
        return _sum(self._all(part))

    def total_at(self, target: int, part: Tensor) -> Tensor | None:
        parts = self._all(part)
        return _sum(parts) if target == self.place else None


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for other in parts[1:]:
        total += other
    return total


def in_threads(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """Return work(columns) of each of some ranks at once; one that fails ends all."""
    barrier, given = Barrier(size), [None] * size

    def run(place: int) -> Any:
        try:
            return work(Threads(place, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, place) for place in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def owned_by(model: nn.Module, slicing: Slicing, num: int, place: int) -> dict[str, Tensor]:
    """What one of some ranks owns of a wide model."""
    owned = {}
    for name, tensor in model.state_dict().items():
        dim = slicing.owned(name)
        if dim is not None:
            owned[name] = tensor.index_select(dim, block(slicing, name, num, place)).clone()
    return owned


def block(slicing: Slicing, name: str, num: int, place: int) -> Tensor:
    """The entries of a tensor's owned dimension that are those of one of some ranks."""
    dim = slicing.owned(name)
    assert dim is not None
    side = slicing.sides[name][dim]
    assert side is not None
    size = slicing.sizes[side.group]
    return side.entries(torch.arange(place * size // num, (place + 1) * size // num), size)


def whole_of(model: nn.Module, slicing: Slicing) -> dict[str, Tensor]:
    """What all ranks have."""
    return {k: tensor for k, tensor in model.state_dict().items() if slicing.owned(k) is None}
