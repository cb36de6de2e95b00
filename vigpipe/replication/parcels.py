"""Send rows from all ranks to the one that writes the run's files.

They wait in the store. So the rows of a rank that dies are not lost, and another writer that takes
over goes on where the last one has stopped.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from vigpipe.replication.store import Store

_NOTED = "parcels/noted"


class Outbox:
    """Sends the parcels of one rank."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank, self._num_sent = store, rank, 0
        self.kept: list[dict[str, Any]] = []  # those that are not in a checkpoint's files

    def send(self, parcel: dict[str, Any]) -> None:
        """Send a parcel; it has arrived when this returns. It is kept even if the store is lost."""
        self.kept.append(parcel)
        self._store.set(_key(self._rank, self._num_sent), json.dumps(parcel))
        self._num_sent += 1


class Inbox:
    """Receives the parcels of several ranks, for the rank that writes the run's files."""

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._next = dict.fromkeys(map(str, ranks), 0)
        self.noted: dict[str, Any] = {}  # the facts of the last note, perhaps by another writer
        if store.check([_NOTED]):
            before = json.loads(store.get(_NOTED))
            self._next, self.noted = before["next"], before["facts"]
        self._first_kept = dict(self._next)  # each rank's first parcel that was not deleted

    def take(self) -> Iterator[dict[str, Any]]:
        """Yield the parcels that have come since the last call, rank by rank."""
        for rank, number in self._next.items():
            while self._store.check([_key(rank, number)]):
                yield json.loads(self._store.get(_key(rank, number)))
                number += 1
            self._next[rank] = number

    def note(self, **facts: Any) -> None:
        """Delete the taken parcels, which are in the files; keep facts for the next writer."""
        self.noted = facts
        self._store.set(_NOTED, json.dumps({"next": self._next, "facts": facts}))
        for rank, end in self._next.items():
            for number in range(self._first_kept.get(rank, 0), end):
                self._store.delete_key(_key(rank, number))
        self._first_kept = dict(self._next)


def _key(rank: int | str, number: int) -> str:
    return f"parcels/{rank}/{number}"
