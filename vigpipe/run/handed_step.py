"""A step that a rank has handed to its device, and what is known once the device has done it."""

import math

from torch import Tensor

from vigpipe.launch.device import ToHost
from vigpipe.parallel.agreement import Agreement
from vigpipe.timing.clock import Lap


class HandedStep:
    """A step that this rank has handed to its device.

    `moments` are those of BatchNorm in all micro-batches, (D * M, 3, channels). `outcome` is (4,)
    float64: the loss, which means nothing on ranks that do not know it; whether the numbers of all
    peers are finite, 1 or 0; whether the step is taken; and the factor of the loss.

    Attributes:
        number: number of the step, counted from 1.
        lr: its learning rate, for the last layer.
        is_complete: whether the device has done the step; the attributes below are known only then.
        loss: over the global batch, on ranks of the last stage; None on others.
        is_finite: whether the gradients and the loss of all peers were finite.
        is_taken: whether the weights have changed.
        loss_factor: what the loss was multiplied by; not 1 only in float16.
        seconds: duration of the step.
        busy_seconds: duration of this rank's forwards and backwards in it, without waiting.
    """

    def __init__(
        self,
        number: int,
        lr: float,
        agreement: Agreement,
        moments: Tensor,
        outcome: Tensor,
        lap: Lap,
    ) -> None:
        self.number, self.lr, self.agreement = number, lr, agreement
        self.moments, self.lap = moments, lap
        self.outcome = ToHost(outcome)
        self.is_complete = self.is_finite = self.is_taken = False
        self.loss: float | None = None
        self.loss_factor = 1.0
        self.seconds = self.busy_seconds = math.nan
