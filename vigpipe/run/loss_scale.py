"""Scale the loss, so that gradients in float16 do not vanish: arXiv:1710.03740, section 3.2."""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST = 2.0**16
NUM_TAKEN = 2000  # steps taken in a row before the scale is doubled; each one skipped halves it


class LossScale:
    """The factor of the loss, a power of two; every rank has the same, on its device."""

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), FIRST, device=device)
        self.num_taken = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients, all of one dtype, by the factor; that is exact."""
        inverse = self.factor.reciprocal().to(gradients[0].dtype)
        torch._foreach_mul_(list(gradients), inverse)

    def update(self, is_taken: Tensor) -> None:
        """Lower the factor after a step that was skipped; raise it after many that were taken."""
        skipped = is_taken.logical_not().float()
        update = torch._amp_update_scale_
        update(self.factor, self.num_taken, skipped, 2.0, 0.5, NUM_TAKEN)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name; a checkpoint keeps it."""
        return {"loss_scale/factor": self.factor, "loss_scale/num_taken": self.num_taken}
