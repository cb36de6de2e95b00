"""Ranks as threads of this process, each with its blocks of a wide model's channels."""

from torch import Tensor, nn

from tests.threads import Meeting
from vigpipe.model.slicing import Slicing


class Threads:
    """The `Columns` of one of some threads."""

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = meeting.rank, meeting.size, meeting

    def _all(self, tensor: Tensor) -> list[Tensor]:
        given = self._meeting.shown(tensor.clone())
        assert {t.shape for t in given} == {tensor.shape}
        return given

    def from_(self, source: int, block: Tensor) -> Tensor:
        return self._all(block)[source]

    def total(self, part: Tensor) -> Tensor:
        return _sum(self._all(part))

    def total_at(self, target: int, part: Tensor) -> Tensor | None:
        parts = self._all(part)
        return _sum(parts) if target == self.rank else None


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for other in parts[1:]:
        total += other
    return total


def owned_by(model: nn.Module, slicing: Slicing, num: int, rank: int) -> dict[str, Tensor]:
    """What one of some ranks owns of a wide model."""
    owned = {}
    for name, tensor in model.state_dict().items():
        dim = slicing.owned(name)
        if dim is not None:
            owned[name] = tensor.index_select(dim, slicing.owned_entries(name, num, rank)).clone()
    return owned


def whole_of(model: nn.Module, slicing: Slicing) -> dict[str, Tensor]:
    """What all ranks have."""
    return {k: tensor for k, tensor in model.state_dict().items() if slicing.owned(k) is None}
