"""Rows on their way from the ranks to the one that writes the run's files.

They wait in the store where the ranks have met, so those of a rank that dies are not lost, and a
writer that takes over goes on where the last one was.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

_NOTED = "parcels/noted"


class Store(Protocol):
    """Of torch's stores, what is needed here."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value; wait until it is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these have values."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Forget a value."""
        ...


class Outbox:
    """What one rank sends.

    Args:
        store: where the ranks have met.
        rank: this rank.

    Attributes:
        kept: what it has sent since it was told to forget that.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank, self._num_sent = store, rank, 0
        self.kept: list[dict[str, Any]] = []

    def send(self, parcel: dict[str, Any]) -> None:
        """Send a parcel; it has arrived when this returns, and is kept if the store is lost."""
        self.kept.append(parcel)
        self._store.set(_key(self._rank, self._num_sent), json.dumps(parcel))
        self._num_sent += 1

    def forget(self) -> None:
        """Forget what was sent, since it is in the run's files by now."""
        self.kept = []


class Inbox:
    """What all ranks have sent, as the writer sees it.

    Args:
        store: where the ranks have met.
        ranks: those that send.

    Attributes:
        noted: the facts that were noted last, perhaps by another writer.
    """

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._next = dict.fromkeys(map(str, ranks), 0)
        self.noted: dict[str, Any] = {}
        if store.check([_NOTED]):
            before = json.loads(store.get(_NOTED))
            self._next, self.noted = before["next"], before["facts"]
        self._kept = dict(self._next)  # the first that was not deleted

    def take(self) -> Iterator[dict[str, Any]]:
        """Yield what has come since, of each rank in order."""
        for rank, number in self._next.items():
            while self._store.check([_key(rank, number)]):
                yield json.loads(self._store.get(_key(rank, number)))
                number += 1
            self._next[rank] = number

    def note(self, **facts: Any) -> None:  # noqa: ANN401
        """Note that all that was taken is in the files, with facts for a writer that takes over."""
        self.noted = facts
        self._store.set(_NOTED, json.dumps({"next": self._next, "facts": facts}))
        for rank, end in self._next.items():
            for number in range(self._kept.get(rank, 0), end):
                self._store.delete_key(_key(rank, number))
        self._kept = dict(self._next)


def _key(rank: int | str, number: int) -> str:
    return f"parcels/{rank}/{number}"
