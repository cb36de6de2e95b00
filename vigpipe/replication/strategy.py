"""What the training loop asks of a strategy, and what a strategy tells it to do next."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from vigpipe.parallel.agreement import Agreement, Peers
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.parcels import Inbox

T = TypeVar("T")


class TakeItem(NamedTuple):
    """Take one optimizer step with an item: one replica's share of a step.

    Step s has the items s * D ... s * D + D - 1, one for each of its D shares.

    Attributes:
        item: number of the item, counted from 0 over the whole run.
        is_evaluation_due: whether the weights must be scored after the step.
        ahead: the items that come next, which workers may read ahead.
    """

    item: int
    is_evaluation_due: bool = False
    ahead: Sequence[int] = ()


class Evaluate(NamedTuple):
    """Score the weights, after the last step of an epoch.

    Attributes:
        epoch: number of the epoch that has ended, counted from 1.
    """

    epoch: int


class AverageWeights(NamedTuple):
    """Average the weights of all replicas: call `Strategy.average_weights`."""


class TakeGradients(NamedTuple):
    """Take one optimizer step with the gradients of another replica, which are in place.

    Attributes:
        replica: whose gradients they are.
        item: that they were computed with.
        step: index of the step, counted on global batches, that they belong to.
        num_samples: samples of the item.
        loss: of the item, on ranks of the last stage.
        moments: of BatchNorm in its micro-batches, in one row.
        seconds: from when the replica took the weights to now.
        staleness: gradients of others that were applied meanwhile.
        damping: what the learning rate is multiplied by.
    """

    replica: int
    item: int
    step: int
    num_samples: int
    loss: float
    moments: Tensor
    seconds: float
    staleness: int
    damping: float


class SkipGradients(NamedTuple):
    """Tell that a replica's gradients, or its loss, were not finite, so no step is taken.

    Attributes:
        replica: whose gradients they are.
        step: index of the step that they would have belonged to.
    """

    replica: int
    step: int


class Finish(NamedTuple):
    """Finish the checkpoint that is still being written: all are about to rest, or to end."""


class Lead(NamedTuple):
    """Write the run's files from now on, since all replicas before this one are lost."""


class Leave(NamedTuple):
    """End without the others, as a replica that was lost in the record that is done again."""


class Rest(NamedTuple):
    """Save a checkpoint: all ranks are here, and nothing is under way between them.

    Attributes:
        step: number of optimizer steps on a global batch that are done, or begun.
        stop: whether the run ends after it.
    """

    step: int
    stop: bool


Turn = (
    TakeItem
    | Evaluate
    | AverageWeights
    | TakeGradients
    | SkipGradients
    | Finish
    | Rest
    | Lead
    | Leave
)


class LeftOver(NamedTuple):
    """What a replica knows when the store is lost where all have met.

    Attributes:
        step: steps that the items belong to which were drawn by then.
        seen: the table, from `Table.seen`.
        parcels: the rows that this rank has told of since the last checkpoint.
    """

    step: int
    seen: Mapping[str, Any]
    parcels: Sequence[Mapping[str, Any]]


class Outcome(NamedTuple):
    """What is known of a step once its gradients are those that it is taken with.

    Attributes:
        moments: of BatchNorm in all micro-batches that count, (micro-batches, 3, channels).
        is_taken: whether the step may change the weights, a scalar on the device; None if it may
            when the numbers of all peers are finite.
        is_own: whether this rank's optimizer takes it; otherwise another rank has the gradients.
    """

    moments: Tensor
    is_taken: Tensor | None = None
    is_own: bool = True


class Strategy(Protocol):
    """How replicas agree.

    Attributes:
        peers: the ranks that take every step together: all of them or none change their weights.
        sums_replicas: whether a step is taken with the gradients of all replicas, summed while the
            last backward runs or right after it. The replicas then stay equal.
        outlives: whether the run goes on without a replica that is lost.
    """

    peers: Peers
    sums_replicas: bool
    outlives: bool

    def restore(self, progress: Mapping[str, Any], kept: Sequence[int]) -> None:
        """Go on where an earlier run has rested, before the first turn.

        Args:
            progress: what that run's strategy returned.
            kept: the replicas whose states it has kept; the others begin with that of the first.

        Raises:
            ValueError: it is malformed, or of another number of replicas.
        """
        ...

    def turns(self, first_step: int, is_evaluated: bool) -> Iterator[Turn]:
        """Yield what this rank does, one thing after the other, until the run ends.

        Args:
            first_step: number of steps that were done before.
            is_evaluated: whether the evaluation that is due after them has been done.
        """
        ...

    def combine_gradients(
        self,
        gradients: Sequence[Tensor],
        moments: Tensor,
        is_finite: Tensor,
        num_samples: int,
        loss: Tensor | None,
    ) -> Outcome:
        """Exchange gradients with other replicas if that is due, after a step's last backward.

        Args:
            gradients: of this rank's stages; they are changed in place.
            moments: of BatchNorm in the micro-batches of the step, (micro-batches, 3, channels).
            is_finite: whether this rank's gradients, and the loss if it knows it, are finite; a
                scalar on the device.
            num_samples: samples of the item.
            loss: of the item, a scalar on the device, on ranks of the last stage.
        """
        ...

    def average_weights(self) -> None:
        """Average the weights over all replicas; all of them call this together."""
        ...

    def hear(self, agreement: Agreement, *, is_full: bool = True) -> None:
        """Be told of each step after it was taken.

        Args:
            agreement: what the peers have said in it.
            is_full: whether its batch was a full one (`vigpipe.job.fill.Fill`).
        """
        ...

    def ask_to_save(self) -> None:
        """Be asked for a checkpoint by all ranks that have just evaluated together."""
        ...

    def together(self, work: Callable[[Counterparts], T]) -> T:
        """Do work together with all replicas that are left, anew if one is lost meanwhile.

        Args:
            work: this rank's part; it is given the ranks with the same stages.
        """
        ...

    def share(self, value: Any) -> dict[int, Any]:  # noqa: ANN401
        """Return the values of all ranks, by rank; each calls this in what is done together.

        Args:
            value: this rank's, of the types of JSON.
        """
        ...

    def heads(self) -> bool:
        """Whether this replica is the one that writes, in what is done together."""
        ...

    def inbox(self) -> Inbox | None:
        """Return what all ranks have told the one that writes; None if it knows all there is."""
        ...

    def note(self, row: dict[str, Any]) -> None:
        """Keep a row of metrics.jsonl for the rank that writes it."""
        ...

    def lost(self) -> dict[int, int]:
        """Return the replicas that were lost since the start, and after how many steps each."""
        ...

    def fail(self, *, ends_run: bool) -> None:
        """Let the others know that this rank fails, and so its replica does.

        Args:
            ends_run: whether the same would happen to the others.
        """
        ...

    def average_at_the_end(self, left: Counterparts) -> None:
        """Make all replicas equal after the last step; all of them call this together.

        Args:
            left: the ranks with the same stages of the replicas that are left.
        """
        ...

    def progress(self) -> Mapping[str, Any]:
        """Return what a later run needs to go on from a rest, besides tensors."""
        ...

    def left_over(self) -> LeftOver:
        """Return what this replica knows once the store is lost; its ranks call this together."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that it keeps besides those of the model, by name."""
        ...

    def stored(self) -> Mapping[str, Tensor]:
        """Return what it keeps in a file, which does not change before the next `Finish`."""
        ...

    def account(self) -> Mapping[str, Any]:
        """Return what this rank has done, for summary.json: counts, seconds and bytes by name."""
        ...

    def close(self) -> None:
        """End what runs beside the loop."""
        ...
