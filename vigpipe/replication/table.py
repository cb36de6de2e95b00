"""What the replicas of a run know of one another: a small table in the store where they have met.

A change of the table is a critical section, without a lock that a dead replica could keep: whoever
wants to change it reads it, changes the copy, and puts it back only if nobody else has done so
meanwhile (compare and set); otherwise it starts again. Only numbers are kept here. Tensors travel
from rank to rank (`replication.exchange`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
KEY = "replicas"  # name of the table in the store


class Store(Protocol):
    """Of torch's stores, what the table needs: `TCPStore` and others implement it."""

    def get(self, key: str, /) -> bytes:
        """Return a value; wait until it is there."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if it is the expected one, and return what it is then."""
        ...


@dataclass
class Table:
    """The state of all replicas; every list has an entry for each of them.

    Attributes:
        drawn: number of items that the pool has handed out.
        taken: items that the replica has taken a step with.
        leases: item that the replica has drawn but taken no step with; -1 for none.
        ahead: item that the replica has drawn to come after that one; -1 for none.
        last: the last item that the replica has taken a step with; -1 for none.
        samples: samples that stand behind the replica's weights: those that it has trained on since
            all were averaged, or its share of those that a pair has trained on.
        joined: averages that the replica has come to, of all or in pairs.
        given: steps that it had taken when it gave its weights for an average that it has not
            applied yet (`replication.travel`); -1 for none.
        given_samples: samples that stood behind these weights.
        closings: how often the pool was closed, so that all could rest.
        evaluated: the last item of replica 0 when it evaluated its weights last; -1 for never. With
            a server, the last of all items when its weights were evaluated.
        rests: how many of the closings the replica has followed.
        finished: whether the replica has nothing left to do.
        updates: gradients that the server has applied.
        pulled: how many it had when the replica took its weights, to compute a gradient that the
            server has not got yet; -1 if there is none.
        tickets: number that the replica waits with until the server gives it its weights, or takes
            its gradient; -1 if it does not wait.
        wanted: whether somebody wants all to rest as soon as they can.
        partners: the replica that it is going to be averaged with; -1 for none.
        waiting: the replica that it waits for, to be averaged with it; -1 for none.
        version: number of changes, so that no two texts are equal.
        by: the replica that made the last one.
    """

    drawn: int
    taken: list[int]
    leases: list[int]
    ahead: list[int]
    last: list[int]
    samples: list[int]
    joined: list[int]
    given: list[int]
    given_samples: list[int]
    evaluated: int
    updates: int
    pulled: list[int]
    tickets: list[int]
    wanted: bool
    closings: int
    rests: list[int]
    finished: list[bool]
    partners: list[int]
    waiting: list[int]
    version: int = 0
    by: int = -1

    @property
    def begun(self) -> int:
        """Number of items that were drawn, without those that come later."""
        return self.drawn - sum(item >= 0 for item in self.ahead)

    def as_text(self) -> str:
        """Return the table as the text that the store keeps."""
        return json.dumps(vars(self), separators=(",", ":"))

    def progress(self) -> dict[str, Any]:
        """Return what a later run needs to go on from a rest: an entry of a checkpoint."""
        passing = (
            *("pulled", "tickets", "wanted", "closings", "rests", "finished"),
            *("partners", "waiting", "version", "by"),
        )
        return {name: value for name, value in vars(self).items() if name not in passing}


def new_table(num_replicas: int) -> Table:
    """Return the table of a run that begins."""
    return Table(
        drawn=0,
        taken=[0] * num_replicas,
        leases=[-1] * num_replicas,
        ahead=[-1] * num_replicas,
        last=[-1] * num_replicas,
        samples=[0] * num_replicas,
        joined=[0] * num_replicas,
        given=[-1] * num_replicas,
        given_samples=[0] * num_replicas,
        evaluated=-1,
        updates=0,
        pulled=[-1] * num_replicas,
        tickets=[-1] * num_replicas,
        wanted=False,
        closings=0,
        rests=[0] * num_replicas,
        finished=[False] * num_replicas,
        partners=[-1] * num_replicas,
        waiting=[-1] * num_replicas,
    )


def resumed_table(progress: Mapping[str, Any], num_replicas: int) -> Table:
    """Return the table of a run that goes on.

    Args:
        progress: what `Table.progress` returned.
        num_replicas: D.

    Raises:
        ValueError: the entry is malformed, or of another number of replicas.
    """
    table = new_table(num_replicas)
    own = table.progress()
    if progress.keys() != own.keys():
        raise ValueError(f"has the entries {', '.join(sorted(progress))}")
    for name, value in progress.items():
        values = value if isinstance(own[name], list) else [value]
        length = num_replicas if isinstance(own[name], list) else 1
        is_valid = isinstance(values, list) and len(values) == length
        if not is_valid or not all(type(v) is int and -1 <= v <= 10**18 for v in values):
            raise ValueError(f"{name} is not a number for each of {num_replicas} replicas")
        setattr(table, name, value)
    return table


class SharedTable:
    """The table of a run, as one of its replicas sees and changes it.

    Args:
        store: where the ranks have met.
        first: the table at the start; every replica gives the same.
        replica_index: the replica that changes it.

    Attributes:
        last_seen: the table as it was when this replica read or changed it last.
    """

    def __init__(self, store: Store, first: Table, replica_index: int) -> None:
        self._store, self._replica_index = store, replica_index
        self._text = store.compare_set(KEY, "", first.as_text()).decode()
        self.last_seen = _parse(self._text)

    def read(self) -> Table:
        """Return the table as it is now; it must not be changed."""
        text = self._store.get(KEY).decode()
        if text != self._text:
            self._text, self.last_seen = text, _parse(text)
        return self.last_seen

    def change(self, change: Callable[[Table], T]) -> T:
        """Change the table at once, as if nobody else did anything meanwhile.

        Args:
            change: changes the table that it is given, and returns anything. It may be called
                several times, each time with a newer table; only the last call counts.

        Returns:
            What the last call has returned.
        """
        while True:
            table = _parse(self._text)
            result = change(table)
            table.version, table.by = table.version + 1, self._replica_index
            desired = table.as_text()
            self._text = self._store.compare_set(KEY, self._text, desired).decode()
            if self._text == desired:
                self.last_seen = table
                return result


def read_table(store: Store) -> Table:
    """Return the table as it is now; wait until there is one."""
    return _parse(store.get(KEY).decode())


def _parse(text: str) -> Table:
    return Table(**json.loads(text))
