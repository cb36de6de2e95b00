"""Replicas take steps of their own, and all of them are averaged every TAU steps (--average-every).

gradients  AllReduce-GCN, Y. Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster",
           Concordia 2021, algorithm 4: every TAU steps the optimizer takes the mean gradient of all
           replicas, and the replica's own in between. Weights are never exchanged, so with TAU > 1
           the replicas drift apart. With TAU = 1 it is synchronous training.
weights    Local SGD, Stich, arXiv:1805.09767: after every TAU steps all replicas take the mean of
           their weights. With a TAU as long as the run it is one-shot averaging.
outer      DiLoCo, Douillard et al., arXiv:2311.08105, algorithm 1: the difference between the mean
           and the weights after the last average drives another optimizer (`replication.outer`).

--overlap  DaSGD, Zhou et al., arXiv:2006.00441: a replica leaves a copy of its weights, and goes on
           without waiting. After exactly K steps of its own it adds what the average has changed:
           weights + (new - copy). So the steps meanwhile are not lost. Running statistics become
           the mean of the copies. A replica that comes to its next average before, or that has no
           items left, applies the last one then.

A rank sends 2 (D - 1) / D * 4 P bytes in an average of P numbers in float32: gradients, or weights
and running statistics (`replication.exchange`); with --compress fewer (`replication.compression`).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vigpipe.replication.averages import Differences
from vigpipe.replication.decisions import ALL, NO_STEP, OWN_GRADIENTS, Action, Decision
from vigpipe.replication.member import Member, Waiting
from vigpipe.replication.outer import Outer
from vigpipe.replication.own_steps import OwnSteps
from vigpipe.replication.table import Table
from vigpipe.replication.travel import Travel


class PeriodicMember(Member):
    """A replica that is averaged with all others."""

    def average(self, *, in_step: bool) -> Waiting[Decision]:
        """Come to the next average if it is due, or apply the last one; wait until all have come.

        With an overlap the replica does not wait when it comes, only when it applies.
        """
        table = self._table.read()
        is_due, given = self._is_due(table, num_open=int(in_step)), table.given[self._index]
        if given >= 0 and (is_due or self._has_overlapped(table, given)):
            return (yield from self._receive(table.joined[self._index]))
        if not is_due:
            return OWN_GRADIENTS
        if self.rules.overlap:
            return self._give()
        if not (yield from self._join()):
            return NO_STEP
        return Decision(Action.AVERAGE, ALL)

    def finish(self) -> Waiting[bool]:
        # An item that another replica has drawn but not begun may make one more average due.
        while max((table := self._table.read()).ahead) >= 0:
            if self._is_closed(table):
                return False
            yield
        return (yield from super().finish())

    def _may_leave(self, table: Table, *, for_good: bool) -> bool:
        return not (for_good and (self._is_due(table) or table.given[self._index] >= 0))

    def _has_overlapped(self, table: Table, given: int) -> bool:
        """Whether an average must be applied for which weights were given after `given` steps."""
        num_steps = table.taken[self._index] - given
        has_item = table.leases[self._index] >= 0 or self._next_item(table) is not None
        return num_steps >= self.rules.overlap or not has_item

    def _give(self) -> Decision:
        def give(table: Table) -> tuple[int, int]:
            table.joined[self._index] += 1
            table.given[self._index] = table.taken[self._index]
            table.given_samples[self._index] = self.samples
            return table.joined[self._index], table.taken[self._index]

        number, step = self._table.change(give)
        self.events.append({"replica": self._index, "step": step, "average": number})
        return Decision(Action.GIVE, number)

    def _receive(self, number: int) -> Waiting[Decision]:
        """Wait until all replicas have given their weights for an average, unless all rest."""

        def receive(table: Table) -> None:
            table.given[self._index] = -1

        while min((table := self._table.read()).joined) < number:
            if self._is_closed(table):
                return NO_STEP
            yield
        self._table.change(receive)
        return Decision(Action.AVERAGE, ALL)

    def _is_due(self, table: Table, num_open: int = 0) -> bool:
        """Whether this replica must come to an average.

        With fixed items one is due after every TAU of its own. With a pool one is due once the pool
        has handed out as many for each replica. In a record it is due where it was.

        `num_open` is 1 if the replica has computed the gradients of a step that it has not taken.
        """
        num_taken = table.taken[self._index] + num_open
        if self._recorded is not None:
            num_due = bisect_right(self._recorded.averages, num_taken)
            if not num_open and num_taken == len(self._recorded.items):
                num_due = len(self._recorded.averages)  # all that are left are due now
        elif self.rules.from_pool:
            num_due = table.num_begun // (self.rules.average_every * self.rules.course.num_replicas)
        else:
            num_due = num_taken // self.rules.average_every
        return num_due > table.joined[self._index]

    def _join(self) -> Waiting[bool]:
        """Come to the next average, and wait; return whether all come before the pool is closed."""

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
    """The strategy of ranks whose replicas are all averaged every TAU steps."""

    _member_type = PeriodicMember
    _outer: Outer | None = None
    _travel: Travel | None = None  # only with --overlap, and other replicas

    def _prepare(self) -> None:
        options = self._options
        if options.average == "outer":
            assert options.outer_lr is not None
            assert options.outer_momentum is not None
            weights = self._weights.parameters
            self._outer = Outer(weights, options.outer_lr, options.outer_momentum)
            if self._compressor is not None:
                self._averages = Differences(self._compressor, self._exchange, self._outer.old)
        if self._rules.overlap:
            self._travel = Travel(self._weights.averaged, self._averages, self.membership.store)

    def restore(self, progress: Mapping[str, Any], kept: Sequence[int]) -> None:
        super().restore(progress, kept)
        first, team = self.membership.first, self._position.team
        if self._travel is not None and first.given[team] >= 0:
            number, num_samples = first.joined[team], first.given_samples[team]
            self._travel.go_on(number, num_samples, has_come=min(first.joined) >= number)

    def _give(self, number: int) -> None:
        assert self._travel is not None
        self._travel.begin(number, self._samples)
        self._count_samples(0)

    @torch.no_grad()
    def average_weights(self) -> None:
        """Average weights and running statistics, or apply the average that was under way."""
        if self._travel is None or not self._travel.is_under_way:
            super().average_weights()
            return
        with self._averaging():
            given, means = self._travel.end()
            news = self._apply(means)
            weights, statistics = self._weights.parameters, self._weights.statistics
            n = len(weights)
            for weight, new, copy in zip(weights.values(), news[:n], given[:n], strict=True):
                weight.copy_(new + (weight - copy))
            for statistic, new in zip(statistics.values(), news[n:], strict=True):
                statistic.copy_(new)

    def _before_rest(self, stop: bool) -> None:
        if self._travel is not None:
            self._travel.pause(stop)

    def _apply(self, means: list[Tensor]) -> list[Tensor]:
        if self._outer is None:
            return means
        num_parameters = len(self._weights.parameters)
        return [*self._outer.step(means[:num_parameters]), *means[num_parameters:]]

    def tensors(self) -> Mapping[str, Tensor]:
        tensors = dict(super().tensors())
        tensors |= {} if self._outer is None else self._outer.tensors()
        return tensors if self._travel is None else tensors | self._travel.tensors()
