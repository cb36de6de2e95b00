"""What the training loop asks of a strategy, and what a strategy tells it to do next."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from vigpipe.parallel.agreement import Agreement, Peers


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


class Rest(NamedTuple):
    """Save a checkpoint: all ranks are here, and nothing is under way between them.

    Attributes:
        stop: whether the run ends after it.
    """

    stop: bool


Turn = TakeItem | Evaluate | Rest


class Strategy(Protocol):
    """How replicas agree.

    Attributes:
        peers: the ranks that take every step together: all of them or none change their weights.
    """

    peers: Peers

    def turns(self, first_step: int, is_evaluated: bool) -> Iterator[Turn]:
        """Yield what this rank does, one thing after the other, until the run ends.

        Args:
            first_step: number of steps that were done before.
            is_evaluated: whether the evaluation that is due after them has been done.
        """
        ...

    def hear(self, agreement: Agreement) -> None:
        """Be told, after each step, what the peers have said in it."""
        ...

    def ask_to_save(self) -> None:
        """Be asked for a checkpoint by all ranks that have just evaluated together."""
        ...
