"""What the training loop asks of a strategy, and what a strategy asks of the loop between items."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from vigpipe.parallel.agreement import Agreement, Peers


class Item(NamedTuple):
    """One replica's share of a step, with which it takes one optimizer step.

    Step s has the items s * D ... s * D + D - 1, one for each of its D shares.

    Attributes:
        number: counted from 0 over the whole run.
        is_evaluation_due: whether the weights must be scored after the step.
        ahead: the next items, which data workers may read ahead.
    """

    number: int
    is_evaluation_due: bool = False
    ahead: Sequence[int] = ()


class Pushed(NamedTuple):
    """Gradients of another replica, which are in place for this rank's optimizer.

    Attributes:
        replica: the replica that has computed them.
        item: number of the item that they were computed with.
        step: index of its step, counted on global batches.
        num_samples: number of its samples.
        loss: its loss, on ranks of the last stage.
        stats: BatchNorm's statistics of its micro-batches, in one row.
        seconds: time since the replica took the weights.
        staleness: number of gradients of others that were applied meanwhile.
        damping: factor of the learning rate.
    """

    replica: int
    item: int
    step: int
    num_samples: int
    loss: float
    stats: Tensor
    seconds: float
    staleness: int
    damping: float


class Outcome(NamedTuple):
    """What is known of a step once its gradients are final.

    Attributes:
        stats: BatchNorm's statistics of all micro-batches that count, (micro-batches, 3, channels).
        is_taken: whether the step may change the weights, a scalar on the device; None if it may
            when the numbers of all peers are finite.
        is_own: whether this rank's optimizer takes it; otherwise another rank has the gradients.
    """

    stats: Tensor
    is_taken: Tensor | None = None
    is_own: bool = True


class Loop:
    """What a strategy asks for between two items; by default the loop does nothing then.

    All ranks of a replica are asked for the same, in the same order.
    """

    def complete(self) -> None:
        """Wait for the steps that the device still works on: their weights are about to be read."""

    def evaluate(self, epoch: int) -> bool:
        """Score the weights after an epoch, counted from 1; return whether they must be saved."""
        return False

    def apply(self, pushed: Pushed) -> None:
        """Take one optimizer step with the gradients of another replica."""

    def skip(self, replica: int, step: int) -> None:
        """Take no step with gradients of a replica, since they or their loss are not finite."""

    def take_over(self) -> None:
        """Write the run's files from now on, since all replicas before this one are lost."""

    def flush(self) -> None:
        """Wait until the last checkpoint is written: all are about to rest, or to end."""

    def rest(self, step: int, *, stop: bool) -> None:
        """Save a checkpoint: all ranks are here, and nothing is under way between them.

        Args:
            step: number of optimizer steps on a global batch that are done, or begun.
            stop: whether the run ends after it; no items come then.
        """


class Strategy(Protocol):
    """How replicas agree. `own_steps.OwnSteps` is the base of those with steps of their own.

    Attributes:
        peers: the ranks that take every step together: all of them or none change their weights.
    """

    peers: Peers

    def items(self, first_step: int, is_evaluated: bool, loop: Loop) -> Iterator[Item]:
        """Yield the items that this rank takes a step with, until the run ends.

        Before it asks for the next item, the caller must hand the step to the device, and call
        `hear`. The strategy asks the loop for all else that is due.

        Args:
            first_step: number of steps that were done before.
            is_evaluated: whether the evaluation that is due after them has been done.
            loop: the loop of this rank.
        """
        ...

    def combine_gradients(
        self,
        gradients: Sequence[Tensor],
        stats: Tensor,
        is_finite: Tensor,
        num_samples: int,
        loss: Tensor | None,
    ) -> Outcome:
        """Exchange gradients with others than the peers if that is due, before the optimizer.

        Args:
            gradients: those of this rank's stages, summed over its peers; changed in place.
            stats: BatchNorm's, in the micro-batches of the step, (micro-batches, 3, channels).
            is_finite: whether this rank's gradients, and the loss if it knows it, are finite; a
                scalar on the device.
            num_samples: number of samples of the item.
            loss: that of the item, a scalar on the device; None except on the last stage.
        """
        ...

    def hear(self, agreement: Agreement, *, is_full: bool = True) -> None:
        """Be told, after each step, what the peers agreed on, and whether its batch was full."""
        ...
