"""The outer optimizer of DiLoCo: SGD with Nesterov momentum on averaged weights."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Outer:
    """Moves the weights from those after the last average towards the mean of the replicas'.

    With old the weights after the last average, mean that of the replicas now, and d = old - mean:

        velocity <- momentum * velocity + d
        new      <- old - lr * (d + momentum * velocity)
                  = lerp(old, mean, lr) - lr * momentum * velocity

    The last line is how it is computed, so that rate 1 and momentum 0 give the mean bit for bit.

    The first average starts from the weights as they are given here.
    """

    def __init__(self, weights: Mapping[str, Tensor], lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self._old = {name: weight.detach().clone() for name, weight in weights.items()}
        self._velocity = {name: torch.zeros_like(weight) for name, weight in self._old.items()}

    @property
    def old(self) -> list[Tensor]:
        """The weights after the last average."""
        return list(self._old.values())

    def step(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return the new weights, given the mean of every parameter over the replicas."""
        for (name, old), mean in zip(self._old.items(), means, strict=True):
            velocity = self._velocity[name]
            velocity.mul_(self._momentum).add_(old - mean)
            old.copy_(torch.lerp(old, mean, self._lr))
            old.sub_(velocity, alpha=self._lr * self._momentum)
        return list(self._old.values())

    def tensors(self) -> dict[str, Tensor]:
        old = {f"outer_old/{name}": tensor for name, tensor in self._old.items()}
        return old | {f"outer_velocity/{name}": t for name, t in self._velocity.items()}
