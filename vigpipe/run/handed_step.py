"""A step that a rank has handed to its device, and what is known once the device has done it."""

import math
from dataclasses import dataclass

from torch import Tensor

from vigpipe.launch.device import ToHost
from vigpipe.parallel.agreement import Agreement
from vigpipe.timing.clock import Lap


@dataclass
class HandedStep:
    """A step that this rank has handed to its device.

    Attributes:
        number: number of the step, counted from 1.
        lr: its learning rate, for the last layer.
        agreement: what all ranks said in it.
        stats: those of BatchNorm in all micro-batches, (D * M, 3, channels).
        outcome: (4,) float64: the loss, which means nothing on ranks that do not know it; whether
            the numbers of all peers are finite, 1 or 0; whether the step is taken; and the factor
            of the loss.
        lap: the times of the step.
        is_complete: whether the device has done the step; the attributes below are known only then.
        is_finite: whether the gradients and the loss of all peers were finite.
        is_taken: whether the weights have changed.
        loss: over the global batch, on ranks of the last stage; None on others.
        loss_factor: what the loss was multiplied by; not 1 only in float16.
        seconds: duration of the step.
        busy_seconds: duration of this rank's forwards and backwards in it, without waiting.
    """

    number: int
    lr: float
    agreement: Agreement
    stats: Tensor
    outcome: ToHost
    lap: Lap
    is_complete: bool = False
    is_finite: bool = False
    is_taken: bool = False
    loss: float | None = None
    loss_factor: float = 1.0
    seconds: float = math.nan
    busy_seconds: float = math.nan
