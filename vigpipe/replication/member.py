"""What one replica does in the table: it takes items, comes to averages, rests, and finishes.

A free replica takes the items that the options give it. A replica that repeats a record takes the
recorded items. The strategy says when it is averaged, and with whom.

Every method that waits is a generator that yields as long as there is nothing to do. So the same
code runs in a trainer, which sleeps meanwhile, and in a simulation, which lets others go on.
"""

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from vigpipe.replication.course import Course
from vigpipe.replication.decisions import Decision
from vigpipe.replication.record import Recorded
from vigpipe.replication.store import StoreLostError
from vigpipe.replication.table import SharedTable, Table

T = TypeVar("T")
Waiting = Generator[None, None, T]


@dataclass(frozen=True)
class Rules:
    """What the options say about the replicas of a run."""

    course: Course
    average_every: int  # TAU, steps from one average to the next; 0 if nothing is averaged
    # Whether gradients are averaged, within a step; otherwise weights are, between two steps.
    gradients: bool
    # Whether items are drawn from the pool; otherwise replica r takes r, r + D, r + 2 D ...
    from_pool: bool
    # Whether a replica draws its next item while it works on one, so that the images can be read.
    looks_ahead: bool = False
    overlap: int = 0  # K, own steps after which an average is applied; 0 to wait for each
    in_sets: bool = False  # whether only even replicas draw partners, and only odd ones are drawn
    answers_after_item: bool = False  # whether one that was drawn comes after its next item
    staleness: int | None = None  # items a worker may be ahead of the slowest; None for no limit
    seed: int = 0  # of the draws of partners


class NoItem(Enum):
    """Why a replica is given no item."""

    CLOSED = "the pool is closed, so that all replicas can rest"
    TOO_EARLY = "it must wait for others first"
    NONE_LEFT = "all items have been taken"


class Participant:
    """A replica or the server, as its first rank sees it."""

    def __init__(self, table: SharedTable, rules: Rules) -> None:
        self._table, self.rules = table, rules
        # The table when all rested last, if this was the leader then, or at the end.
        self.rested = table.read()
        # With a server, the last item before the last evaluation; -1 for none.
        self.evaluated = self.rested.evaluated
        self.events: list[dict[str, int]] = []  # rows of events.jsonl (`replication.record`)

    def see(self) -> Table:
        """Return the table as it is now; it must not be changed."""
        return self._table.read()

    def known(self) -> Table:
        """Return the table as it was last seen, with what this one has done since."""
        return self._table.last_seen

    def answer(self) -> None:
        """Decide, as the leader, how it goes on after a rest: whether all save, or stop."""
        self._table.change(Table.answer)
        self.rested = self._table.last_seen

    def close(self, *, stop: bool = False) -> None:
        """Ask all to rest before they take another item, to save, and perhaps to end."""
        raise NotImplementedError

    def lose(self, replica: int) -> None:
        """Go on without another replica, which is dead or does not answer."""
        self._table.lose(replica)

    def part(self, partner: int) -> None:
        """Go on without a replica that was lost within an exchange, which does not count then."""
        self.lose(partner)


class Member(Participant):
    """A replica. With `recorded`, it does that again."""

    def __init__(
        self,
        table: SharedTable,
        replica_index: int,
        rules: Rules,
        recorded: Recorded | None = None,
    ) -> None:
        super().__init__(table, rules)
        self._index, self._recorded = replica_index, recorded
        # What it was trained on since it was averaged; the strategy keeps count.
        self.samples = self.rested.samples[replica_index]
        self._noted_step = self.rested.taken[replica_index]
        self._was_leader = replica_index == 0

    def average(self, *, in_step: bool) -> Waiting[Decision]:
        """Come to an average if one is due, and wait for the other replicas that take part.

        With `in_step`, the replica has computed the gradients of a step that it has not taken.
        The decision is AVERAGE or GIVE; OWN_GRADIENTS if none is due; NO_STEP if it does not take
        place, since the pool was closed meanwhile.
        """
        raise NotImplementedError

    def _may_leave(self, table: Table, *, for_good: bool) -> bool:
        """Whether it may leave, for good or to rest; this may free, in the table, who waits."""
        raise NotImplementedError

    def _next_item(self, table: Table) -> int | None:
        if self._recorded is not None:
            items, num_taken = self._recorded.items, table.taken[self._index]
            return items[num_taken] if num_taken < len(items) else None
        item = table.next_item(self._index, from_pool=self.rules.from_pool)
        return item if item < self.rules.course.num_items else None

    def take(self) -> int | NoItem:
        """Take the next item; it is leased to this replica until a step was taken with it."""
        return self._table.change(self._take)

    def _take(self, table: Table) -> int | NoItem:
        if self._is_closed(table):
            return NoItem.CLOSED
        if table.leases[self._index] < 0:
            item = self._next_item(table)
            if item is None:
                return NoItem.NONE_LEFT
            if not self._may_begin(table, item):
                return NoItem.TOO_EARLY
            table.draw(self._index, item)
            table.leases[self._index] = item
        if self.rules.looks_ahead and table.ahead[self._index] < 0:
            coming = self._next_item(table)
            if coming is not None:
                table.draw(self._index, coming)
                table.ahead[self._index] = coming
        return table.leases[self._index]

    def _may_begin(self, table: Table, item: int) -> bool:
        """Whether it may begin this item, its next one, now."""
        return True

    @property
    def ahead(self) -> int:
        """The item that comes after the leased one; -1 if that is not known."""
        return self._table.last_seen.ahead[self._index]

    def finish_item(self) -> None:
        """Note that a step was taken with the leased item."""

        def change(table: Table) -> tuple[int, int]:
            item = table.leases[self._index]
            table.taken[self._index] += 1
            table.last[self._index] = item
            table.leases[self._index] = -1
            table.samples[self._index] = self.samples
            return table.taken[self._index], item

        try:
            self.note_item(*self._table.change(change))
        except StoreLostError:
            # The step is in the weights, so what `known` returns must count it.
            self.note_item(*change(self._table.last_seen))
            raise

    def note_item(self, step: int, item: int) -> None:
        """Note for the record that a step is taken with an item, unless that was noted before."""
        if step > self._noted_step:
            self._noted_step = step
            self.events.append({"replica": self._index, "step": step, "item": item})

    def epoch_to_evaluate(self, item: int) -> int:
        """Return the epoch that the leader must evaluate before an item, and note it; or 0."""
        course, table = self.rules.course, self._table.last_seen
        last = table.last[self._index]
        if last in (-1, table.evaluated):
            return 0
        last_step = last // course.num_replicas
        if course.next_evaluation(last_step) > item // course.num_replicas:
            return 0

        def change(table: Table) -> None:
            table.evaluated = last

        self._table.change(change)
        return course.epoch(last_step)

    def known(self) -> Table:
        table = self._table.last_seen
        table.samples[self._index] = self.samples
        return table

    def close(self, *, stop: bool = False) -> None:
        def change(table: Table) -> None:
            table.save_wanted, table.stop_wanted = True, table.stop_wanted or stop
            if not self._is_closed(table):
                table.closings += 1

        self._table.change(change)

    def rest(self) -> Waiting[bool]:
        """Rest because the pool is closed, and wait until every replica does.

        Nothing is under way then. The leader says how it goes on: whether all save, and whether
        they stop. After that the pool is open again. Return False at once if the replica must come
        to an average before.
        """

        def change(table: Table) -> int:
            if not self._may_leave(table, for_good=False):
                return 0
            table.rests[self._index] = table.closings
            table.samples[self._index] = self.samples
            return table.closings

        closing = self._table.change(change)
        while closing and (table := self._table.read()).answered < closing:
            if table.all_rest(closing) and self.is_leader:
                self.answer()
            else:
                yield
        return closing > 0

    @property
    def is_leader(self) -> bool:
        """Whether it is the first of the replicas that are left."""
        return self._table.last_seen.left[0] == self._index

    def became_leader(self) -> bool:
        """Whether it has become the leader since the last call."""
        before, self._was_leader = self._was_leader, self.is_leader
        return self.is_leader and not before

    @property
    def leaves_early(self) -> bool:
        """Whether it repeats a replica that was lost, and has come to that point."""
        recorded, table = self._recorded, self._table.last_seen
        return recorded is not None and recorded.is_lost and self._may_leave(table, for_good=True)

    def leave(self) -> None:
        """Let the others go on as if this replica had died."""
        self._table.change(lambda table: table.lose(self._index))

    def finish(self) -> Waiting[bool]:
        """Say that nothing is left to do, and wait until every replica says so.

        Return False if the replica must come to an average before, if the pool is closed
        meanwhile, or if a lost replica has left work to do.
        """

        def change(table: Table) -> bool:
            if self._is_closed(table) or not self._may_leave(table, for_good=True):
                return False
            table.finished[self._index] = True
            table.samples[self._index] = self.samples
            return True

        if not self._table.change(change):
            return False
        while not all((table := self._table.read()).finished):
            # A replica that is lost now gives its items back, so there may be work again.
            if self._is_closed(table) or not table.finished[self._index]:
                return False
            yield
        self.rested = table
        return True

    def _is_closed(self, table: Table) -> bool:
        return table.closings > table.rests[self._index]
