"""Name the optimizer's moments of a sub-model's weights, which travel with the weights."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

_PREFIX = "optimizer/"


def moment_name(kind: str, name: str) -> str:
    """Return the name of one of a parameter's moments; its kind is, for example, `exp_avg`."""
    return f"{_PREFIX}{kind}/{name}"


def is_moment(name: str) -> bool:
    """Whether a name is one of `moment_name`."""
    return name.startswith(_PREFIX)


class Moments(Mapping[str, Tensor]):
    """The moments that an optimizer has now, by `moment_name`; it may replace these tensors.

    `kinds` are the names in the optimizer's state of tensors with the shape of a parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],
        kinds: Sequence[str],
    ) -> None:
        self._optimizer = optimizer
        self._sources = {
            moment_name(kind, name): (parameter, kind)
            for kind in kinds
            for name, parameter in parameters.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        parameter, kind = self._sources[name]
        return self._optimizer.state[parameter][kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
