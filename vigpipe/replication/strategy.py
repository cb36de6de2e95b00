"""What the training loop asks of a strategy, and what a strategy asks of the loop between items."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from vigpipe.parallel.agreement import Agreement, Peers


class Item(NamedTuple):
    """One replica's share of a step, with which it takes one optimizer step.

    Step s has the items s * D ... s * D + D - 1, one for each of its D shares.
    """

    number: int  # counted from 0 over the whole run
    is_evaluation_due: bool = False  # whether the weights must be scored after the step
    ahead: Sequence[int] = ()  # the next items, which data workers may read ahead


class Pushed(NamedTuple):
    """Gradients of another replica, which are in place for this rank's optimizer."""

    replica: int  # the one that has computed them
    item: int
    step: int  # counted on global batches
    num_samples: int
    loss: float  # on ranks of the last stage
    stats: Tensor  # BatchNorm's statistics of its micro-batches, in one row
    seconds: float  # since the replica took the weights
    staleness: int  # number of gradients of others that were applied meanwhile
    damping: float  # factor of the learning rate


class Computed(NamedTuple):
    """What a rank has computed of its item, before an optimizer takes the step."""

    gradients: Sequence[Tensor]  # of this rank's stages, summed over its peers; changed in place
    stats: Tensor  # BatchNorm's of the step's micro-batches, (micro-batches, 3, channels)
    is_finite: Tensor  # whether they are, and the loss if known; a scalar on the device
    num_samples: int
    is_trained: bool  # whether the rank's share has anything to train on
    loss: Tensor | None  # of the item, a scalar on the device; only on the last stage


class Outcome(NamedTuple):
    """What is known of a step once its gradients are final."""

    # BatchNorm's statistics of all micro-batches that count, (micro-batches, 3, channels).
    stats: Tensor
    # Whether the step may change the weights, a scalar on the device; None if it may when the
    # numbers of all peers are finite, and one of them has something to train on.
    is_taken: Tensor | None = None
    # Whether this rank's optimizer takes it; otherwise another rank has the gradients.
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

        `step` optimizer steps on a global batch are done, or begun. No items come after a `stop`.
        """


class Strategy(Protocol):
    """How replicas agree. `own_steps.OwnSteps` is the base of those with steps of their own."""

    peers: Peers  # the ranks that take every step together: all change their weights, or none

    def items(self, first_step: int, is_evaluated: bool, loop: Loop) -> Iterator[Item]:
        """Yield the items that this rank takes a step with, until the run ends.

        Before it asks for the next item, the caller must hand the step to the device, and call
        `hear`. The strategy asks the loop for all else that is due. `first_step` steps were done
        before, and perhaps the evaluation that is due after them.
        """
        ...

    def combine_gradients(self, own: Computed) -> Outcome:
        """Exchange gradients with others than the peers if that is due, before the optimizer."""
        ...

    def hear(self, agreement: Agreement, *, is_full: bool = True) -> None:
        """Be told, after each step, what the peers agreed on, and whether its batch was full."""
