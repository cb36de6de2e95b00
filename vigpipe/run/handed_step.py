"""A step that a rank has handed to its device, and what is known once the device has done it."""

import math
from dataclasses import dataclass

from torch import Tensor

from vigpipe.launch.device import ToHost
from vigpipe.parallel.agreement import Agreement
from vigpipe.timing.clock import Lap


@dataclass
class HandedStep:
    """A step that this rank has handed to its device."""

    number: int  # counted from 1
    lr: float  # for the last layer
    agreement: Agreement
    stats: Tensor  # those of BatchNorm in all micro-batches, (D * M, 3, channels)
    # (4,) float64: the loss, which means nothing on ranks that do not know it; whether the numbers
    # of all peers are finite, 1 or 0; whether the step is taken; and the factor of the loss.
    outcome: ToHost
    lap: Lap
    # Whether the device has done the step; what follows is known only then.
    is_complete: bool = False
    is_finite: bool = False  # the gradients and the loss of all peers
    is_taken: bool = False  # so that the weights have changed
    loss: float | None = None  # over the global batch, on ranks of the last stage; None on others
    loss_factor: float = 1.0  # not 1 only in float16
    seconds: float = math.nan
    busy_seconds: float = math.nan  # of this rank's forwards and backwards, without waiting
