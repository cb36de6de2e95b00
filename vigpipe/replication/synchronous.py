"""All replicas take every step together, with the sum of their gradients.

Step s is one optimizer step on the global batch, and replica r computes its share r. The gradients
are summed at the end of the last backward (`parallel.gradients`), so the replicas stay equal.

Exchanged are gradients: with --sync drain or ddp, a ring sends 2 (D - 1) / D * 4 P bytes a rank and
step, P being the rank's parameters in float32; with --sync double twice as many; with --compress
fewer (`replication.compression`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from vigpipe.parallel.agreement import Agreement, Peers
from vigpipe.replication.course import Course
from vigpipe.replication.strategy import Evaluate, Outcome, Rest, TakeItem, Turn


class Synchronous:
    """The strategy of ranks that take every step together; see `Strategy`.

    Args:
        course: the steps of the run.
        replica_index: the replica that this rank belongs to.
        peers: all ranks.
    """

    sums_replicas = True

    def __init__(self, course: Course, replica_index: int, peers: Peers) -> None:
        self.peers = peers
        self._course, self._replica_index = course, replica_index
        self._saves = self._stops = False  # what the ranks want after the last step

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Do nothing: the step is all that there is to know."""

    def turns(self, first_step: int, is_evaluated: bool) -> Iterator[Turn]:
        """Yield every step with what is due after it; the same turns on all ranks."""
        course = self._course
        if not is_evaluated:
            yield Evaluate(course.epoch(first_step - 1))
            yield from self._rest(first_step)
        for step in range(first_step, course.num_steps):
            evaluation = course.next_evaluation(step)  # workers read test images then
            item, *_ = ahead = course.items(step, evaluation, self._replica_index)
            is_evaluation_due = step + 1 == evaluation
            yield TakeItem(item, is_evaluation_due, ahead[1:])
            if is_evaluation_due and not self._stops:
                yield Evaluate(course.epoch(step))
            yield from self._rest(step + 1)

    def _rest(self, step: int) -> Iterator[Turn]:
        if self._saves or self._stops or step == self._course.num_steps:
            yield Rest(step, self._stops)
        self._saves = self._stops = False

    def hear(self, agreement: Agreement) -> None:
        """Note what the ranks want after the step that they have just taken."""
        self._saves, self._stops = agreement.save, agreement.stop

    def ask_to_save(self) -> None:
        """Rest after the evaluation."""
        self._saves = True

    def combine_gradients(
        self,
        gradients: Sequence[Tensor],
        moments: Tensor,
        is_finite: Tensor,
        num_samples: int,
        loss: Tensor | None,
    ) -> Outcome:
        """Do nothing: they are sums over the replicas already."""
        return Outcome(moments)

    def average_weights(self) -> None:
        """Do nothing: the replicas are equal."""

    def average_at_the_end(self) -> None:
        """Do nothing: the replicas are equal."""

    def progress(self) -> Mapping[str, Any]:
        """Return nothing: the step is all that there is to know."""
        return {}

    def take_events(self) -> list[dict[str, Any]]:
        """Return nothing: every step is the same."""
        return []

    def tensors(self) -> Mapping[str, Tensor]:
        """Return nothing."""
        return {}

    def account(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""
