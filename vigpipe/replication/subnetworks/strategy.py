"""The strategy of independent sub-networks: each round, every replica trains other channels.

In a round, the m replicas are given disjoint channels of the wide model, each trains its sub-model
for TAU steps on all the data, in an order of its own and with a new optimizer, and all put their
slices back. With --carry-moments the optimizer goes on with the stored moments of these weights. An
epoch of a sub-model is one pass over the data; the sub-models share E epochs, so each takes
ceil(E / m).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vigpipe.config.options import TrainConfig
from vigpipe.launch.device import return_freed_memory
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.course import Course
from vigpipe.replication.decisions import Action, Decision
from vigpipe.replication.own_steps import OwnSteps, Weights
from vigpipe.replication.periodic import PeriodicMember
from vigpipe.replication.position import Position
from vigpipe.replication.record import Recorded
from vigpipe.replication.strategy import Item, Loop
from vigpipe.replication.subnetworks.draws import Channels, draw_channels
from vigpipe.replication.subnetworks.rows import Wide, WideRows
from vigpipe.replication.table import Table


class RoundsMember(PeriodicMember):
    """A replica that ends each round together with all others."""

    def epoch_to_evaluate(self, item: int) -> int:
        return 0  # nobody evaluates alone

    def _is_due(self, table: Table, num_open: int = 0) -> bool:
        """Whether a round is over, and is not the last one."""
        has_more = table.taken[self._index] < self.rules.course.num_steps
        return has_more and super()._is_due(table, num_open)


class Subnetworks(OwnSteps):
    """The strategy of ranks that train sub-models."""

    _member_type = RoundsMember
    _round = 0
    _is_being_saved = False  # whether a checkpoint may still be reading what is stored

    def __init__(
        self,
        wide: Wide,
        options: TrainConfig,
        course: Course,
        position: Position,
        weights: Weights,
        recorded: Sequence[Recorded] | None = None,
    ) -> None:
        super().__init__(options, course, position, weights, recorded)
        self.wide_rows = WideRows(wide, position.across_teams)  # what this rank stores of it
        self.wide_rows.take(self._chosen())

    def _chosen(self) -> list[Channels]:
        """Return the channels of each replica in this round."""
        sizes = self.wide_rows.wide.slicing.sizes
        return draw_channels(sizes, self._position.num_teams, self._options.seed, self._round)

    def restore(self, progress: Mapping[str, Any], kept: Sequence[int]) -> None:
        super().restore(progress, kept)
        self._round = self.membership.first.joined[self._position.team]
        self.wide_rows.wide.choose(self._chosen()[self._position.team])

    def items(self, first_step: int, is_evaluated: bool, loop: Loop) -> Iterator[Item]:
        yield from super().items(first_step, is_evaluated, loop)
        # The last slices are put back next, which changes what a checkpoint may still be reading.
        loop.complete()
        loop.flush()

    def _do(self, decision: Decision, loop: Loop) -> Iterator[Item]:
        if decision.action is Action.AVERAGE and self._is_being_saved:
            loop.complete()
            loop.flush()
            self._is_being_saved = False
        yield from super()._do(decision, loop)
        if decision.action in (Action.REST, Action.STOP):
            self._is_being_saved = True
        if decision.action is Action.AVERAGE and (epoch := self._epoch_to_evaluate()):
            self._evaluate(epoch, loop)

    def _epoch_to_evaluate(self) -> int:
        """Return the epoch that must be evaluated after this round; 0 for none.

        Only between two rounds is the wide model complete; all replicas evaluate it together then.
        """
        every = self._rules.average_every
        before, now = ((self._round - n) * every for n in (1, 0))
        due = self._course.next_evaluation(before)
        return self._course.epoch(due - 1) if due <= now < self._course.num_steps else 0

    @torch.no_grad()
    def average_weights(self) -> None:
        """End a round: put the slices back, draw other channels, and take their slices."""
        with self._averaging():
            self._put_back()
            self._round += 1
            self.wide_rows.take(self._chosen())
            self._count_samples(0)

    @torch.no_grad()
    def average_at_the_end(self, left: Counterparts) -> None:
        """Put the last slices back; all replicas call this together."""
        with self._averaging():
            self._put_back()
        self._tell()

    def _put_back(self) -> None:
        """Put the slices back; clear the optimizer's state unless it travels with them."""
        if not self.wide_rows.wide.moments:
            self.wide_rows.wide.optimizer.state.clear()
        self.wide_rows.give(self._chosen())
        return_freed_memory()

    def stored(self) -> Mapping[str, Tensor]:
        return self.wide_rows.stored

    def account(self) -> Mapping[str, Any]:
        return {**super().account(), "bytes_sent": self.wide_rows.bytes_sent}
