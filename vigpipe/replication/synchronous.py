"""All replicas take every step together, with the sum of their gradients.

Step s is one optimizer step on the global batch, and replica r computes its share r. The gradients
are summed at the end of the last backward (`parallel.gradients`), so the replicas stay equal.

With --sync drain or ddp, a ring sends 2 (D - 1) / D * 4 P bytes of gradients a rank and step, P
being the rank's parameters in float32; with --sync double it sends twice as many, with --compress
fewer (`replication.compression`).
"""

from collections.abc import Iterator

from vigpipe.parallel.agreement import Agreement, Peers
from vigpipe.replication.course import Course
from vigpipe.replication.strategy import Computed, Item, Loop, Outcome


class Synchronous:
    """The strategy of ranks that take every step together, so that all ranks are peers."""

    def __init__(self, course: Course, replica_index: int, peers: Peers) -> None:
        self.peers = peers
        self._course, self._replica_index = course, replica_index
        self._saves = self._stops = False  # whether a rank wants that after the last step

    def items(self, first_step: int, is_evaluated: bool, loop: Loop) -> Iterator[Item]:
        course = self._course
        if not is_evaluated:
            self._saves |= loop.evaluate(course.epoch(first_step - 1))
            self._rest(first_step, loop)
        for step in range(first_step, course.num_steps):
            evaluation = course.next_evaluation(step)  # data workers read test images then
            number, *_ = ahead = course.items(step, evaluation, self._replica_index)
            is_evaluation_due = step + 1 == evaluation
            yield Item(number, is_evaluation_due, ahead[1:])
            if is_evaluation_due and not self._stops:
                self._saves |= loop.evaluate(course.epoch(step))
            self._rest(step + 1, loop)
            if self._stops:
                return

    def _rest(self, step: int, loop: Loop) -> None:
        if self._saves or self._stops or step == self._course.num_steps:
            loop.rest(step, stop=self._stops)
        self._saves = False

    def combine_gradients(self, own: Computed) -> Outcome:
        return Outcome(own.stats)

    def hear(self, agreement: Agreement, *, is_full: bool = True) -> None:
        self._saves, self._stops = agreement.save, agreement.stop
