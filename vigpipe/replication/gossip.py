"""Replicas take steps of their own, and two of them at a time are averaged (gossip).

GossipGCN, Y. Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster", Concordia 2021. After
every TAU steps (--average-every) a replica draws a partner at random among those that have none.
One change of the table makes each of the two the other's partner, so at any time the partners are
disjoint pairs. Nobody waits for a replica that waits for somebody else, and a replica that was
drawn always comes: there is no deadlock. If all others have partners, the replica goes on alone.

--pairs any    The final version, algorithm 6: every replica draws, and every one can be drawn.
--pairs sets   Version 1, algorithm 5: replicas with even numbers draw those with odd numbers, which
               never draw themselves.
--answer       When a replica comes that was drawn: after its next item (`item`, as the odd ones of
               version 1 do), or at its own next multiple of TAU steps (`interval`, the final
               version as it was published).

gradients  As published: the optimizers of both take the mean gradient, and weights are never
           exchanged. A replica that finishes or rests has used its last gradient, so it sets its
           partner free, which takes a step with its own gradient.
weights    Both take the mean of their weights and running statistics, as in AD-PSGD, Lian et al.,
           arXiv:1710.06952. The mean is weighted by the samples that stand behind the weights,
           which both share afterwards. So an average changes neither sum(samples) nor
           sum(samples * weights) over all replicas, except for rounding. With --compress bfloat16
           the weights of both are rounded to bfloat16, and so is their mean.

Each of the two replicas sends 4 P bytes for P numbers in float32: gradients, or weights and running
statistics. That does not depend on the number of replicas. With --compress they send fewer
(`replication.compression`).
"""

import random

from torch import Tensor

from vigpipe.replication.decisions import ALL, NO_STEP, OWN_GRADIENTS, Action, Decision
from vigpipe.replication.member import Member, Rules, Waiting
from vigpipe.replication.own_steps import OwnSteps
from vigpipe.replication.record import Recorded
from vigpipe.replication.table import SharedTable, Table

NOBODY = -1


class GossipMember(Member):
    """A replica that is averaged with one other at a time."""

    def __init__(
        self, table: SharedTable, replica_index: int, rules: Rules, recorded: Recorded | None = None
    ) -> None:
        super().__init__(table, replica_index, rules, recorded)
        self._random = random.Random(f"{rules.seed} {replica_index}")
        self._drew_at = self.rested.taken[replica_index]  # number of its steps when it drew last
        self._met_at = 0  # the step in or after which it met a partner last

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

        `num_open` is 1 if the replica has computed the gradients of a step that it has not taken.
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
            comes = is_time or self.rules.answers_after_item or self._is_closed(table)
            return partner if comes or self._next_item(table) is None else NOBODY
        return self._table.change(self._draw) if is_time else NOBODY

    def _draw(self, table: Table) -> int:
        """Draw a partner as part of a change of the table, unless somebody has drawn this one."""
        if table.partners[self._index] != NOBODY or self._is_closed(table):
            return table.partners[self._index]
        if self.rules.in_sets and self._index % 2:
            return NOBODY
        others = [
            other
            for other, partner in enumerate(table.partners)
            if partner == NOBODY
            and other != self._index
            and not table.finished[other]
            and (other % 2 or not self.rules.in_sets)
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
                return False  # the partner was lost a moment ago
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
                # A record does not tell whether the partner comes before it rests.
                is_over = self._recorded is not None and self._is_closed(table)
                if is_over and self._table.change(leave):
                    return NO_STEP
                yield
        table = self._table.last_seen
        if table.joined[self._index] < number:
            return OWN_GRADIENTS  # the partner has set this replica free, or is lost
        step = table.taken[self._index] + self.rules.gradients
        # The rows are in the record before anything is sent, because either may be lost then.
        if table.leases[self._index] >= 0:
            self.note_item(step, table.leases[self._index])
        self._met_at = step
        self.events.append({"replica": self._index, "step": step, "partner": partner})
        return Decision(Action.AVERAGE, partner)

    def part(self, partner: int) -> None:
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
    """The strategy of ranks whose replicas are averaged in pairs."""

    _member_type = GossipMember

    def _samples_after(self, total: Tensor) -> int:
        # Both share the samples; the replica with the lower index takes the odd one. After an
        # average of all, samples do not count any more.
        if self._partner == ALL:
            return 0
        is_lower = self._position.team < self._partner
        return (int(total) + is_lower) // 2
