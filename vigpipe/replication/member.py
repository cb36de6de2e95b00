"""One replica's part in the table: it takes items, comes to averages, rests, and finishes.

Which item comes next, and when an average is due, is a matter of its kind: `FreeMember` decides as
the options say, and `record.RecordedMember` does again what was recorded.

Every method that waits is a generator that yields as long as there is nothing to do. So the same
code runs in a trainer, which sleeps meanwhile, and in a simulation, which lets others go on.
"""

from collections.abc import Generator
from enum import Enum

from vigpipe.replication.course import Course
from vigpipe.replication.table import SharedTable, Table

Waiting = Generator[None, None, bool]


class NoItem(Enum):
    """Why a replica is given no item."""

    CLOSED = "the pool is closed, so that all replicas can rest"
    NONE_LEFT = "all items have been taken"


class Member:
    """A replica, as its first rank sees it.

    Args:
        table: the table of all replicas.
        replica_index: which of them this is.

    Attributes:
        samples: samples that it has trained on since it was averaged; the strategy keeps count.
        events: what it has done, as rows of events.jsonl (`replication.record`).
    """

    def __init__(self, table: SharedTable, replica_index: int) -> None:
        self._table, self._index = table, replica_index
        self.samples = table.read().samples[replica_index]
        self.events: list[dict[str, int]] = []

    def next_item(self, table: Table) -> int | None:
        """Return the item that comes next; None if none is left."""
        raise NotImplementedError

    def is_average_due(self, num_open: int = 0) -> bool:
        """Whether this replica must come to an average now.

        Args:
            num_open: steps that it is about to have taken: 1 in the midst of one, else 0.
        """
        raise NotImplementedError

    def take(self) -> int | NoItem:
        """Take the next item; it is leased to this replica until a step was taken with it."""

        def change(table: Table) -> int | NoItem:
            if self._is_closed(table):
                return NoItem.CLOSED
            if table.leases[self._index] < 0:
                item = self.next_item(table)
                if item is None:
                    return NoItem.NONE_LEFT
                table.drawn += 1
                table.leases[self._index] = item
            return table.leases[self._index]

        return self._table.change(change)

    def finish_item(self) -> None:
        """Note that a step was taken with the leased item."""

        def change(table: Table) -> tuple[int, int]:
            item = table.leases[self._index]
            table.taken[self._index] += 1
            table.last[self._index] = item
            table.leases[self._index] = -1
            table.samples[self._index] = self.samples
            return table.taken[self._index], item

        step, item = self._table.change(change)
        self.events.append({"replica": self._index, "step": step, "item": item})

    def epoch_to_evaluate(self, course: Course, item: int) -> int:
        """Tell whether the weights must be scored before an item; if so, that counts as done.

        Args:
            course: the steps of the run.
            item: the next item of this replica, the only one that evaluates.

        Returns:
            The number of the epoch that has ended, counted from 1; 0 for none.
        """

        def change(table: Table) -> int:
            last = table.last[self._index]
            if last in (-1, table.evaluated):
                return 0
            last_step = last // course.num_replicas
            if course.next_evaluation(last_step) > item // course.num_replicas:
                return 0
            table.evaluated = last
            return course.epoch(last_step)

        return self._table.change(change)

    def join(self, num_open: int = 0) -> Waiting:
        """Come to the next average, and wait until every replica has.

        Args:
            num_open: as for `is_average_due`.

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
        step = table.taken[self._index] + num_open
        self.events.append({"replica": self._index, "step": step, "average": number})
        return True

    def close(self) -> None:
        """Ask all replicas to rest before they take another item."""

        def change(table: Table) -> None:
            if not self._is_closed(table):
                table.closings += 1

        self._table.change(change)

    def rest(self) -> Waiting:
        """Rest because the pool is closed, and wait until every replica does.

        Nothing is under way then. The pool is open again for whoever goes on.
        """

        def change(table: Table) -> int:
            table.rests[self._index] = table.closings
            table.samples[self._index] = self.samples
            return table.closings

        number = self._table.change(change)  # of the closing
        while min(self._table.read().rests) < number:
            yield
        return True

    def finish(self) -> Waiting:
        """Have nothing left to do, and wait until that holds for every replica.

        Returns:
            True; or False at once if the pool is closed meanwhile, so that all can rest.
        """

        def change(table: Table) -> None:
            table.finished[self._index] = True
            table.samples[self._index] = self.samples

        self._table.change(change)
        while not all((table := self._table.read()).finished):
            if self._is_closed(table):
                return False
            yield
        return True

    def see(self) -> Table:
        """Return a copy of the table as it is now."""
        return self._table.read()

    def _is_closed(self, table: Table) -> bool:
        return table.closings > table.rests[self._index]


class FreeMember(Member):
    """A replica that takes what comes next, and is averaged as often as the options say.

    Args:
        table: the table of all replicas.
        replica_index: which of them this is.
        course: the steps of the run.
        average_every: steps from one average to the next.
        from_pool: whether items are drawn from the pool; otherwise replica r takes the items
            r, r + D, r + 2 D ...
    """

    def __init__(
        self,
        table: SharedTable,
        replica_index: int,
        course: Course,
        average_every: int,
        *,
        from_pool: bool,
    ) -> None:
        super().__init__(table, replica_index)
        self._course, self._average_every, self._from_pool = course, average_every, from_pool

    def next_item(self, table: Table) -> int | None:
        """Return the pool's next item, or the next one of this replica's own."""
        own = self._index + table.taken[self._index] * self._course.num_replicas
        item = table.drawn if self._from_pool else own
        return item if item < self._course.num_items else None

    def is_average_due(self, num_open: int = 0) -> bool:
        """Whether this replica must come to an average now.

        With fixed items one is due after every `average_every` of its own. With a pool one is due
        once the pool has handed out as many for each replica.
        """
        table = self.see()
        own = (table.taken[self._index] + num_open) // self._average_every
        all_drawn = table.drawn // (self._average_every * self._course.num_replicas)
        return (all_drawn if self._from_pool else own) > table.joined[self._index]
