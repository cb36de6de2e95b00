"""Replicas take steps of their own, and two of them at a time are averaged (gossip).

GossipGCN, Y. Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster", Concordia 2021. After
every TAU steps (--average-every) a replica draws a partner at random among those that have none.
The draw names each of the two as the other's partner, in one change of the table, so at any time
the partners are disjoint pairs. Nobody waits for a replica that waits for somebody else, and a
replica that was drawn always comes: there is no deadlock. If all others have partners, the replica
goes on alone.

--pairs any    The final version, algorithm 6: every replica draws, and every one can be drawn.
--pairs sets   Version 1, algorithm 5: replicas with even numbers draw those with odd numbers, which
               never draw themselves.
--answer       When a replica comes that was drawn: after its next item (`item`, as the odd ones of
               version 1 do), or at its own next multiple of TAU steps (`interval`, the final
               version as it was published).

gradients  As published: the optimizers of both take the mean gradient, and weights are never
           exchanged. A replica that finishes or rests does not come with its last gradient once
           more, which it has used: it sets its partner free, who takes a step with its own.
weights    Both take the mean of their weights and running statistics, as in AD-PSGD, Lian et al.,
           arXiv:1710.06952. The mean weighs by the samples that stand behind the weights, and these
           are then shared among both, so neither sum(samples) nor sum(samples * weights) over all
           replicas is changed by an average, but for rounding. With --compress bfloat16 the weights
           of both count as rounded to bfloat16, and so is their mean.

Each of the two replicas sends 4 P bytes for P numbers in float32: gradients, or weights and running
statistics. That does not depend on the number of replicas. With --compress they send fewer
(`replication.compression`).
"""

import random

from torch import Tensor

from vigpipe.replication.decisions import ALL, NO_STEP, OWN_GRADIENTS, Decision, Kind
from vigpipe.replication.member import Member, Rules, Waiting
from vigpipe.replication.own_steps import OwnSteps
from vigpipe.replication.record import Recorded
from vigpipe.replication.table import SharedTable, Table

NOBODY = -1


class GossipMember(Member):
    """A replica that is averaged with one other at a time; see `Member`.

    Args:
        table: the table of all replicas.
        replica_index: which of them this is.
        rules: what the options say.
        recorded: what it is to do again; None if it is free.
        in_sets: whether only even replicas draw, and only odd ones are drawn.
        answers_after_item: whether a replica that was drawn comes after its next item.
        seed: of the draws.
    """

    def __init__(
        self,
        table: SharedTable,
        replica_index: int,
        rules: Rules,
        recorded: Recorded | None = None,
        *,
        in_sets: bool,
        answers_after_item: bool,
        seed: int,
    ) -> None:
        super().__init__(table, replica_index, rules, recorded)
        self._in_sets, self._answers_after_item = in_sets, answers_after_item
        self._random = random.Random(f"{seed} {replica_index}")
        self._drew_at = table.read().taken[replica_index]  # after how many steps it drew last
        self._met_at = 0  # in or after which step it met a partner last

    def average(self, *, in_step: bool) -> Waiting[Decision]:
        """Come to an average with a partner, if there is one and it is time; wait for the other."""
        if in_step != self.rules.gradients:
            return OWN_GRADIENTS
        partner = self._partner_now(self._table.read(), num_open=int(in_step))
        if partner == NOBODY:
            return OWN_GRADIENTS
        return (yield from self._meet(partner))

    def _partner_now(self, table: Table, num_open: int) -> int:
        """Return the replica that this one must be averaged with now; NOBODY if that is none.

        Args:
            table: the table.
            num_open: steps that the replica is about to have taken: 1 in the midst of one, else 0.
        """
        num_taken = table.taken[self._index] + num_open
        if self._recorded is not None:
            pairs, num_done = self._recorded.pairs, table.joined[self._index]
            is_next = num_done < len(pairs) and pairs[num_done].step <= num_taken
            return pairs[num_done].partner if is_next else NOBODY
        is_time = num_taken % self.rules.average_every == 0 and num_taken > self._drew_at
        if is_time:
            self._drew_at = num_taken
        partner = table.partners[self._index]
        if partner != NOBODY:
            comes = is_time or self._answers_after_item or self._is_closed(table)
            return partner if comes or self._next_item(table) is None else NOBODY
        return self._table.change(self._draw) if is_time else NOBODY

    def _draw(self, table: Table) -> int:
        """Draw a partner as part of a change of the table, unless somebody has drawn this one."""
        if table.partners[self._index] != NOBODY or self._is_closed(table):
            return table.partners[self._index]
        if self._in_sets and self._index % 2:
            return NOBODY
        others = [
            other
            for other, partner in enumerate(table.partners)
            if partner == NOBODY
            and other != self._index
            and not table.finished[other]
            and (other % 2 or not self._in_sets)
        ]
        if not others:
            return NOBODY
        partner = self._random.choice(others)
        table.partners[self._index], table.partners[partner] = partner, self._index
        return partner

    def _meet(self, partner: int) -> Waiting[Decision]:
        """Wait for a partner, and let both go as soon as they have met."""

        def come(table: Table) -> bool:
            if self._recorded is None and table.partners[self._index] != partner:
                return False  # it was lost a moment ago
            if table.waiting[partner] != self._index:
                table.waiting[self._index] = partner
                return False
            table.waiting[partner] = NOBODY
            for replica in (self._index, partner):
                table.partners[replica] = NOBODY
                table.joined[replica] += 1
            return True

        def leave(table: Table) -> bool:
            has_met = table.waiting[self._index] == NOBODY
            table.waiting[self._index] = NOBODY
            return not has_met

        number = self._table.last_seen.joined[self._index] + 1
        if not self._table.change(come):
            while (table := self._table.read()).waiting[self._index] != NOBODY:
                # In a record it is not known whether the partner has come before it rests.
                is_over = self._recorded is not None and self._is_closed(table)
                if is_over and self._table.change(leave):
                    return NO_STEP
                yield
        table = self._table.last_seen
        if table.joined[self._index] < number:
            return OWN_GRADIENTS  # the partner has set it free, or is lost
        step = table.taken[self._index] + self.rules.gradients
        # The record has these rows before anything is sent: either of the two may be lost now.
        if table.leases[self._index] >= 0:
            self.note_item(step, table.leases[self._index])
        self._met_at = step
        self.events.append({"replica": self._index, "step": step, "partner": partner})
        return Decision(Kind.AVERAGE, partner)

    def part(self, partner: int) -> None:
        """Note that an average has not taken place, and go on without the partner."""
        self.events.append({"replica": self._index, "step": self._met_at, "apart": partner})
        self.lose(partner)

    def _may_leave(self, table: Table, *, for_good: bool) -> bool:
        if self._recorded is not None:
            return not for_good or table.joined[self._index] == len(self._recorded.pairs)
        partner = table.partners[self._index]
        if partner != NOBODY and self.rules.gradients:
            for replica in (self._index, partner):
                table.partners[replica] = table.waiting[replica] = NOBODY
        return table.partners[self._index] == NOBODY


class Gossip(OwnSteps):
    """The strategy of ranks whose replicas are averaged in pairs; see `OwnSteps`."""

    def _prepare(self) -> None:
        # NCCL opens its connections in the first exchange, which must be one of all ranks.
        some = next(iter(self._weights.parameters.values()))
        self._exchange.gather(some.new_zeros(1))

    def _make_member(self, table: SharedTable, recorded: Recorded | None) -> Member:
        options = self._options
        return GossipMember(
            table,
            self._place.team,
            self._rules,
            recorded,
            in_sets=options.pairs == "sets",
            answers_after_item=options.answer == "item",
            seed=options.seed,
        )

    def _samples_after(self, total: Tensor) -> int:
        """Share the samples among both; if they are odd, the replica that comes first has one more.

        After an average of all, the samples count no more.
        """
        if self._partner == ALL:
            return 0
        larger = self._place.team < self._partner
        return (int(total) + larger) // 2
