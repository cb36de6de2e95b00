"""What the optimizer of a sub-model keeps of its weights, where it travels with them."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

_PREFIX = "optimizer/"


def moment_name(kind: str, name: str) -> str:
    """Return the name of what is kept of a parameter, such as its `exp_avg`."""
    return f"{_PREFIX}{kind}/{name}"


def is_moment(name: str) -> bool:
    """Whether a name is one of `moment_name`."""
    return name.startswith(_PREFIX)


class Moments(Mapping[str, Tensor]):
    """The tensors that an optimizer has now, by `moment_name`; it may take other ones.

    Args:
        optimizer: the optimizer.
        parameters: by name.
        kinds: what it keeps that has the shape of a parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],
        kinds: Sequence[str],
    ) -> None:
        self._optimizer = optimizer
        self._places = {
            moment_name(kind, name): (parameter, kind)
            for kind in kinds
            for name, parameter in parameters.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor as it is now."""
        parameter, kind = self._places[name]
        return self._optimizer.state[parameter][kind]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._places)
