"""What replicas did, in which order each of them did it: enough to do all of it again.

A run whose replicas take steps of their own leaves events.jsonl. Each row is of one replica:

    {"replica": 1, "step": 3, "item": 7}       its third step, which it took with item 7
    {"replica": 1, "step": 3, "average": 1}    the first average that it came to: after its third
                                               step, or in it if gradients are averaged

Steps are counted from 1, the replica's own. Nothing else depends on how long anything took. So
whoever takes the same items in the same order, and comes to the same averages, ends in the same
weights, bit for bit. (A replica that comes to an average of gradients without one of its own, since
no item was left, does so in the step after its last.)
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vigpipe.replication.member import Member
from vigpipe.replication.table import SharedTable, Table


@dataclass
class Recorded:
    """What one replica did.

    Attributes:
        items: the items of its steps, in order.
        averages: the steps of its averages, in order.
    """

    items: list[int] = field(default_factory=list)
    averages: list[int] = field(default_factory=list)


def collect(rows: Iterable[Mapping[str, Any]], num_replicas: int) -> list[Recorded]:
    """Collect the rows of events.jsonl by replica.

    Args:
        rows: the rows, without those that tell how the run was started.
        num_replicas: D.

    Raises:
        ValueError: a row is malformed, or not the next one of its replica; it is shown.
    """
    recorded = [Recorded() for _ in range(num_replicas)]
    for row in rows:
        replica, step = row.get("replica", -1), row.get("step", -1)
        kinds = row.keys() - {"replica", "step"}
        is_event = _is_count(replica) and _is_count(step) and len(kinds) == 1
        if not is_event or replica >= num_replicas:
            raise ValueError(f"{row} is no event of one of {num_replicas} replicas")
        of = recorded[replica]
        (kind,) = kinds
        is_item = kind == "item" and step == len(of.items) + 1 and _is_count(row[kind])
        is_average = (
            kind == "average"
            and row[kind] == len(of.averages) + 1
            and step in (len(of.items), len(of.items) + 1)
        )
        if is_item:
            of.items.append(row[kind])
        elif is_average:
            of.averages.append(step)
        else:
            raise ValueError(f"{row} is not the next event of its replica")
    return recorded


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= 10**18


class RecordedMember(Member):
    """A replica that does what it did before.

    Args:
        table: the table of all replicas.
        replica_index: which of them this is.
        recorded: what it did.
    """

    def __init__(self, table: SharedTable, replica_index: int, recorded: Recorded) -> None:
        super().__init__(table, replica_index)
        self._recorded = recorded

    def next_item(self, table: Table) -> int | None:
        """Return the next item of the record; None if it has no more."""
        num_taken, items = table.taken[self._index], self._recorded.items
        return items[num_taken] if num_taken < len(items) else None

    def is_average_due(self, num_open: int = 0) -> bool:
        """Whether it came to an average at this point."""
        table, averages = self.see(), self._recorded.averages
        num_taken = table.taken[self._index]
        if num_taken == len(self._recorded.items):  # whatever is left comes now
            return table.joined[self._index] < len(averages)
        return bisect_right(averages, num_taken + num_open) > table.joined[self._index]
