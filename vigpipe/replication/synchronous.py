"""All replicas take every step together, with the sum of their gradients.

Step s is one optimizer step on the global batch, and replica r computes its share r. The gradients
are summed at the end of the last backward (`parallel.gradients`), so the replicas stay equal.

Exchanged are gradients: with --sync drain or ddp, a ring sends 2 (D - 1) / D * 4 P bytes a rank and
step, P being the rank's parameters in float32; with --sync double twice as many; with --compress
fewer (`replication.compression`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from vigpipe.parallel.agreement import Agreement, Peers, all_gather_values
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.course import Course
from vigpipe.replication.strategy import Evaluate, LeftOver, Outcome, Rest, TakeItem, Turn

T = TypeVar("T")


class Synchronous:
    """The strategy of ranks that take every step together; see `Strategy`.

    Args:
        course: the steps of the run.
        replica_index: the replica that this rank belongs to.
        peers: all ranks.
        counterparts: the ranks with the same stages; by default this one is alone.
    """

    sums_replicas = True
    outlives = False

    def __init__(
        self,
        course: Course,
        replica_index: int,
        peers: Peers,
        counterparts: Counterparts | None = None,
    ) -> None:
        self.peers, self._counterparts = peers, counterparts or Counterparts(None)
        self._course, self._replica_index = course, replica_index
        self._saves = self._stops = False  # what the ranks want after the last step

    def restore(self, progress: Mapping[str, Any], kept: Sequence[int]) -> None:
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

    def hear(self, agreement: Agreement, *, is_full: bool = True) -> None:
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

    def average_at_the_end(self, left: Counterparts) -> None:
        """Do nothing: the replicas are equal."""

    def together(self, work: Callable[[Counterparts], T]) -> T:
        """Do work; nobody is missing."""
        return work(self._counterparts)

    def share(self, value: Any) -> dict[int, Any]:  # noqa: ANN401
        """Return the values of all ranks, by rank."""
        return dict(enumerate(all_gather_values(value, *self.peers)))

    def heads(self) -> bool:
        """Whether this is replica 0."""
        return self._replica_index == 0

    def inbox(self) -> None:
        """Return nothing: the rank that writes knows all there is."""

    def note(self, row: dict[str, Any]) -> None:
        """Do nothing: the rank that writes has every row."""

    def lost(self) -> dict[int, int]:
        """Return nobody: without one of them the run ends."""
        return {}

    def fail(self, *, ends_run: bool) -> None:
        """Do nothing: the others notice that a peer is lost."""

    def progress(self) -> Mapping[str, Any]:
        """Return nothing: the step is all that there is to know."""
        return {}

    def left_over(self) -> LeftOver:
        """Return nothing: the store is not needed."""
        return LeftOver(0, {}, ())

    def tensors(self) -> Mapping[str, Tensor]:
        """Return nothing."""
        return {}

    def stored(self) -> Mapping[str, Tensor]:
        """Return nothing: all that it has is in memory."""
        return {}

    def account(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""
