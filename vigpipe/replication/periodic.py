"""Replicas take steps of their own, and all of them are averaged every TAU steps (--average-every).

gradients  AllReduce-GCN, Y. Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster",
           Concordia 2021, algorithm 4: every TAU steps the optimizer takes the mean gradient of all
           replicas, and the replica's own in between. Weights are never exchanged, so with TAU > 1
           the replicas drift apart. With TAU = 1 it is synchronous training.
weights    Local SGD, Stich, arXiv:1805.09767: after every TAU steps all replicas take the mean of
           their weights. With a TAU as long as the run it is one-shot averaging.
outer      DiLoCo, Douillard et al., arXiv:2311.08105, algorithm 1: what the mean differs by from
           the weights after the last average drives an optimizer of its own (`replication.outer`).

A rank sends 2 (D - 1) / D * 4 P bytes in an average of P numbers in float32: gradients, or weights
and running statistics (`replication.exchange`).
"""

from bisect import bisect_right
from collections.abc import Mapping

from torch import Tensor

from vigpipe.replication.decisions import ALL, NO_STEP, OWN_GRADIENTS, Decision, Kind
from vigpipe.replication.member import Member, Waiting
from vigpipe.replication.outer import Outer
from vigpipe.replication.own_steps import OwnSteps
from vigpipe.replication.record import Recorded
from vigpipe.replication.table import SharedTable, Table


class PeriodicMember(Member):
    """A replica that is averaged with all others; see `Member`."""

    def average(self, *, in_step: bool) -> Waiting[Decision]:
        """Come to the next average if it is due, and wait until every replica has."""
        if not self._is_due(self._table.read(), num_open=int(in_step)):
            return OWN_GRADIENTS
        if not (yield from self._join()):
            return NO_STEP
        return Decision(Kind.AVERAGE, ALL)

    def _may_leave(self, table: Table, *, for_good: bool) -> bool:
        return not (for_good and self._is_due(table))

    def _is_due(self, table: Table, num_open: int = 0) -> bool:
        """Whether this replica must come to an average.

        With fixed items one is due after every TAU of its own. With a pool one is due once the pool
        has handed out as many for each replica. In a record it is due where it was.

        Args:
            table: the table.
            num_open: steps that the replica is about to have taken: 1 in the midst of one, else 0.
        """
        num_taken = table.taken[self._index] + num_open
        if self._recorded is not None:
            num_due = bisect_right(self._recorded.averages, num_taken)
            if not num_open and num_taken == len(self._recorded.items):
                num_due = len(self._recorded.averages)  # whatever is left comes now
        elif self.rules.from_pool:
            num_due = table.drawn // (self.rules.average_every * self.rules.course.num_replicas)
        else:
            num_due = num_taken // self.rules.average_every
        return num_due > table.joined[self._index]

    def _join(self) -> Waiting[bool]:
        """Come to the next average, and wait until every replica has.

        Returns:
            Whether the average takes place. It does not if the pool was closed before all have
            come; the replica has then left again.
        """

        def come(table: Table) -> int:
            table.joined[self._index] += 1
            return table.joined[self._index]

        def leave(table: Table) -> bool:
            if min(table.joined) >= number:
                return False
            table.joined[self._index] -= 1
            return True

        number = self._table.change(come)
        while min((table := self._table.read()).joined) < number:
            if self._is_closed(table) and self._table.change(leave):
                return False
            yield
        step = table.taken[self._index] + self.rules.gradients
        self.events.append({"replica": self._index, "step": step, "average": number})
        return True


class Periodic(OwnSteps):
    """The strategy of ranks whose replicas are averaged now and then; see `OwnSteps`."""

    _outer: Outer | None = None

    def _prepare(self) -> None:
        options = self._options
        if options.average == "outer":
            assert options.outer_lr is not None
            assert options.outer_momentum is not None
            weights = self._weights.parameters
            self._outer = Outer(weights, options.outer_lr, options.outer_momentum)

    def _make_member(self, table: SharedTable, recorded: Recorded | None) -> Member:
        return PeriodicMember(table, self._place.team, self._rules, recorded)

    def _apply(self, means: list[Tensor]) -> list[Tensor]:
        if self._outer is None:
            return means
        num_parameters = len(self._weights.parameters)
        return [*self._outer.step(means[:num_parameters]), *means[num_parameters:]]

    def _samples_after(self, total: Tensor) -> int:
        return 0

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the state of the outer optimizer."""
        return {} if self._outer is None else self._outer.tensors()
